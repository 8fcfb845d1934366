/* Calls as PyTorch makes them: what the functions throw becomes an answer. */
#include <chrono>
#include <cstddef>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <future>
#include <new>
#include <thread>

namespace {

template <typename Call> int answer(Call call, char *words, size_t room) {
    try {
        call();
        return 0;
    } catch (const std::bad_alloc &error) {
        strncpy(words, error.what(), room - 1);
        return 1;
    } catch (const std::exception &error) {
        strncpy(words, error.what(), room - 1);
        return 2;
    }
}

} // namespace

extern "C" int call_allocate(void *(*allocate)(ptrdiff_t, int, void *), void **out, ptrdiff_t nbytes, int ordinal,
                             void *stream, char *words, size_t room) {
    return answer([=] { *out = allocate(nbytes, ordinal, stream); }, words, room);
}

extern "C" int call_record_stream(void (*record)(void *, void *), void *data, void *stream, char *words, size_t room) {
    return answer([=] { record(data, stream); }, words, room);
}

/* A thread that Python never saw allocates, lends, drops and trims, while this one waits for it, with the GIL if `hold`. 3: it
 * had not returned when this one had waited for long enough. */
extern "C" int call_beside_the_gil(void *(*allocate)(ptrdiff_t, int, void *), void (*record)(void *, void *),
                                   void (*deallocate)(void *, ptrdiff_t, int, void *), void (*trim)(), ptrdiff_t nbytes,
                                   void *home, void *user, int hold, char *words, size_t room) {
    auto take = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
    auto leave = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
    auto lend = [=] {
        for (int round = 0; round < 2; ++round) {
            void *data = allocate(nbytes, 0, home);
            record(data, user);
            deallocate(data, nbytes, 0, home);
        }
        trim();
    };
    int state = hold ? take() : 0;
    std::packaged_task<int()> task([=] { return answer(lend, words, room); });
    std::future<int> outcome = task.get_future();
    std::thread other(std::move(task));
    bool returned = outcome.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    if (hold) leave(state);
    other.join();
    if (returned) return outcome.get();
    strncpy(words, "it waited for the GIL", room - 1);
    return 3;
}
