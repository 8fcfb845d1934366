/* Included before everything else in a build whose lines are traced (KINA_COVERAGE=1 of setup.py).
 *
 * Such a build takes the GIL at every line, those under a mutex included. Whoever waits for a mutex must therefore not
 * hold the GIL, or both wait for ever. */
#ifndef KINA_TRACED_MUTEX_H
#define KINA_TRACED_MUTEX_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>

static inline int kina_traced_mutex_lock(pthread_mutex_t *mutex) {
    PyThreadState *state;
    int result = pthread_mutex_trylock(mutex);
    if (result == 0) return 0;
    state = PyGILState_Check() ? PyEval_SaveThread() : NULL;
    result = pthread_mutex_lock(mutex);
    if (state) PyEval_RestoreThread(state);
    return result;
}

#define pthread_mutex_lock kina_traced_mutex_lock

#endif
