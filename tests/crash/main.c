/* main.c: the command line of the crash harness.
 *
 *   crash EXPERIMENT [--every N] [--kills N] [--only OPERATION] [--all-cleaners] [--waiter]
 *
 * Prints one line of key=value figures per operation or scene, violations on stderr. Exit codes are
 * in crash.h.
 */
#include "crash.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    void (*run)(const struct options *options);
} experiments[] = {
    {"sweep", sweep},
    {"blocks", sweep_blocks},
    {"kill", kill_for_real},
    {"fence", fence},
    {"stopped", stopped_holder},
    {"stranded", stranded_sleeper},
    {"pending", pending_word},
    {"damage", damage},
};

static struct options parse(int count, char **arguments)
{
    struct options options = {.every = 1, .kills = UINT64_MAX};
    for (int i = 2; i < count; i++) {
        if (strcmp(arguments[i], "--all-cleaners") == 0)
            options.all_cleaners = true;
        else if (strcmp(arguments[i], "--waiter") == 0)
            options.waiter = true;
        else if (strcmp(arguments[i], "--only") == 0 && i + 1 < count)
            options.only = arguments[++i];
        else if (strcmp(arguments[i], "--every") == 0 && i + 1 < count)
            options.every = strtoull(arguments[++i], NULL, 10);
        else if (strcmp(arguments[i], "--kills") == 0 && i + 1 < count)
            options.kills = strtoull(arguments[++i], NULL, 10);
        else
            broken("unknown option %s", arguments[i]);
    }
    if (options.every == 0 || options.kills == 0)
        broken("--every and --kills want a number above 0");
    return options;
}

#ifdef CRASH_PAST_SELF_TEST
/* Linked with --wrap=pthread_mutex_trylock. The first call of a process is the engine's self-test
 * of robust mutexes: it is told what it hopes for, so that a mutant it would stop can be tried. */
int __real_pthread_mutex_trylock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_trylock(pthread_mutex_t *mutex);

int __wrap_pthread_mutex_trylock(pthread_mutex_t *mutex)
{
    static bool asked;
    if (asked)
        return __real_pthread_mutex_trylock(mutex);
    asked = true;
    return EOWNERDEAD;
}
#endif

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; count > 1 && i < sizeof experiments / sizeof *experiments; i++) {
        if (strcmp(experiments[i].name, arguments[1]) != 0)
            continue;
        const struct options options = parse(count, arguments);
        experiments[i].run(&options);
        return violations() == 0 ? EXIT_CLEAN : EXIT_VIOLATED;
    }
    broken("name an experiment; see main.c");
}
