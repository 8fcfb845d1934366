# What it does when it comes by: it answers how much is left to come again for. Set once, by the room that knows.
cdef void set_reap(int (*reap)() noexcept nogil) noexcept
# From now on `reap` is called every 20 ms or so, on a native thread that has no context current and not the GIL, until
# there is nothing left. Between two calls what waits for the GIL is done. Any thread, with or without the GIL; starts
# the thread if it does not run yet. Does nothing once the interpreter's exit has begun.
cdef void reaper_wake() noexcept nogil
