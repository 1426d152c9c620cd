/* The ladder once more, without counting, for the clock: the same functions under other names.
 * One copy of the text serves both, so what is timed is what is counted. */
#define LADDER_TIMED
#include "ref/softmax_ladder.c"
#include "ref/three_pass.c"
#include "ref/flash1.c"
#include "ref/flash2.c"
#include "ref/decode_ladder.c"
#include "ref/backward_ladder.c"
