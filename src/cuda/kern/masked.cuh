/* Why scores of a block may be masked: the mask must be asked, the keys end in it, or both.
 * Full blocks of an imported mask are live whatever its mod says of them. */
#pragma once

enum { MASKED_BY_MOD = 1, MASKED_BY_END = 2 };

DEVICE int masked_by(int asks_mod, int has_end)
{
    return (asks_mod ? MASKED_BY_MOD : 0) | (has_end ? MASKED_BY_END : 0);
}
