/* Calls as PyTorch makes them: what the functions throw becomes an answer. */
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>

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
