/* One loop over byte ranges, called through ctypes, which lets other Python threads run meanwhile. */

#include <stdint.h>
#include <string.h>

void move_ranges(const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        memmove((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], lengths[i]);
}
