/* Loops over host memory, called through ctypes, which lets other Python threads run meanwhile. */

#include <stdint.h>
#include <string.h>

void move_ranges(const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        memmove((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], lengths[i]);
}

/* Has the system give every page of a range. Atomic, so that nothing is lost that a copy writes there meanwhile. */
void touch_pages(uint64_t address, uint64_t length, uint64_t step)
{
    for (uint64_t done = 0; done < length; done += step)
        __atomic_fetch_or((unsigned char *)(uintptr_t)(address + done), 0, __ATOMIC_RELAXED);
}
