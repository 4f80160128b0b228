/* The time of day, off by the seconds in /run/faults/clock: for the program that switches and its children only.
 * The kernel's clock belongs to the whole machine and is never set by a test. CLOCK_BOOTTIME stays true, as it
 * does on a real host when somebody sets the date. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    long seconds = 0;
    FILE *stream = fopen("/run/faults/clock", "re");
    if (stream) {
        if (fscanf(stream, "%ld", &seconds) != 1) seconds = 0;
        fclose(stream);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (where) *where = precise.tv_sec;
    return precise.tv_sec;
}
