/* ulp.h: distance in units of the last place. */
#include "support/ulp.h"

#include <math.h>

double ulp_error(float got, double want)
{
    int exponent;
    if (isnan(want) || isinf((float)want))
        return (isnan(want) && isnan(got)) || got == (float)want ? 0.0 : INFINITY;
    if (!isfinite(got))
        return INFINITY;
    frexp(want, &exponent);
    if (want == 0.0 || exponent < -125)
        exponent = -125;
    return fabs((double)got - want) / ldexp(1.0, exponent - 24);
}

double wide_sigmoid(double x)
{
    const double e = exp(-fabs(x));
    return (x < 0 ? e : 1.0) / (1.0 + e);
}
