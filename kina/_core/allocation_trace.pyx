# cython: annotation_typing=False
"""Logs of allocations in memory: one record of 32 bytes for each line, frees joined with their allocations."""

from array import array

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

from kina.errors import ArgumentError, InvalidConfigError, SessionClosedError

__all__ = ["AllocationTrace"]


cdef enum:
    COLUMNS = 6
    LONGEST_NAME = 47
    LONGEST_LINE = 1 << 20
    NO_SLOT = 0xffffffff

cdef int64_t DAY_US = 86_400_000_000
cdef const char *NO_MEMORY = b"there is no host memory for more events"


# Names ----------------------------------------------------------------------------------------------------


cdef uint32_t place_of_name(const name_table *table, const char *text) noexcept nogil:
    cdef uint64_t hashed = 14695981039346656037u
    cdef uint32_t place, letter
    for letter in range(LONGEST_NAME + 1):
        hashed = (hashed ^ <uint8_t> text[letter]) * 1099511628211u
    place = <uint32_t> (hashed >> 32) & (table.place_count - 1)
    while table.places[place] != 0 and memcmp(table.names[table.places[place] - 1], text, LONGEST_NAME + 1) != 0:
        place = (place + 1) & (table.place_count - 1)
    return place


cdef bint grow_names(name_table *table) noexcept nogil:
    cdef uint32_t capacity = max(16, 2 * table.capacity)
    cdef uint32_t number
    cdef void *names = realloc(table.names, <size_t> capacity * sizeof(table.names[0]))
    cdef uint32_t *places
    if names == NULL:
        return False
    table.names = <char (*)[48]> names
    places = <uint32_t *> calloc(2 * <size_t> capacity, sizeof(uint32_t))
    if places == NULL:
        return False
    free(table.places)
    table.places = places
    table.capacity = capacity
    table.place_count = 2 * capacity
    for number in range(table.count):
        places[place_of_name(table, table.names[number])] = number + 1
    return True


cdef int64_t number_of_name(name_table *table, const char *text, const char *end) noexcept nogil:
    """-1: it is empty or too long, or there is no memory for it."""
    cdef char name[48]
    cdef uint32_t place
    if not 0 < end - text <= LONGEST_NAME:
        return -1
    memset(name, 0, sizeof(name))
    memcpy(name, text, end - text)
    if table.count != 0 and memcmp(table.names[table.last], name, sizeof(name)) == 0:
        return table.last
    if table.count == table.capacity and not grow_names(table):
        return -1
    place = place_of_name(table, name)
    if table.places[place] == 0:
        memcpy(table.names[table.count], name, sizeof(name))
        table.count += 1
        table.places[place] = table.count
    table.last = table.places[place] - 1
    return table.last


cdef tuple names_of(const name_table *table):
    return tuple([(<bytes> (<char *> table.names[number])).decode("utf-8", "replace") for number in range(table.count)])


# Numbers --------------------------------------------------------------------------------------------------


cdef bint read_decimal(const char *text, const char *end, uint64_t *out) noexcept nogil:
    """An integer below 2**63."""
    cdef uint64_t number = 0
    if text == end or end - text > 19:
        return False
    while text < end:
        if not c"0" <= text[0] <= c"9":
            return False
        number = 10 * number + <uint64_t> (text[0] - c"0")
        text += 1
    out[0] = number
    return number < <uint64_t> 1 << 63


cdef bint read_address(const char *text, const char *end, uint64_t *out) noexcept nogil:
    """Hexadecimal with or without 0x, or what C libraries print for NULL."""
    cdef uint64_t number = 0
    cdef char digit
    out[0] = 0
    if end - text == 5 and memcmp(text, b"(nil)", 5) == 0:
        return True
    if end - text > 2 and text[0] == c"0" and (text[1] | 0x20) == c"x":
        text += 2
    if text == end or end - text > 16:
        return False
    while text < end:
        digit = text[0] | 0x20
        if c"0" <= text[0] <= c"9":
            number = 16 * number + <uint64_t> (text[0] - c"0")
        elif c"a" <= digit <= c"f":
            number = 16 * number + <uint64_t> (digit - c"a" + 10)
        else:
            return False
        text += 1
    out[0] = number
    return True


# Live addresses -------------------------------------------------------------------------------------------


cdef inline size_t home_of_address(uint64_t address, size_t capacity) noexcept nogil:
    return <size_t> ((address * 11400714819323198485u) >> 32) & (capacity - 1)


cdef inline size_t place_of_address(const uint64_t *addresses, size_t capacity, uint64_t address) noexcept nogil:
    cdef size_t place = home_of_address(address, capacity)
    while addresses[place] != 0 and addresses[place] != address:
        place = (place + 1) & (capacity - 1)
    return place


cdef bint grow_live(AllocationTrace trace) noexcept nogil:
    cdef size_t capacity = max(<size_t> 1024, 2 * trace.live_capacity)
    cdef uint64_t *addresses = <uint64_t *> calloc(capacity, sizeof(uint64_t))
    cdef uint32_t *slots = <uint32_t *> calloc(capacity, sizeof(uint32_t))
    cdef size_t old, place
    if addresses == NULL or slots == NULL:
        free(addresses)
        free(slots)
        return False
    for old in range(trace.live_capacity):
        if trace.live_addresses[old] != 0:
            place = place_of_address(addresses, capacity, trace.live_addresses[old])
            addresses[place] = trace.live_addresses[old]
            slots[place] = trace.live_slots[old]
    free(trace.live_addresses)
    free(trace.live_slots)
    trace.live_addresses, trace.live_slots, trace.live_capacity = addresses, slots, capacity
    return True


cdef void remove_live(AllocationTrace trace, size_t place) noexcept nogil:
    """Those behind move up, so that no gap comes between a place and its home."""
    cdef size_t mask = trace.live_capacity - 1
    cdef size_t following = place, home
    while True:
        following = (following + 1) & mask
        if trace.live_addresses[following] == 0:
            break
        home = home_of_address(trace.live_addresses[following], trace.live_capacity)
        if ((following - home) & mask) >= ((following - place) & mask):
            trace.live_addresses[place] = trace.live_addresses[following]
            trace.live_slots[place] = trace.live_slots[following]
            place = following
    trace.live_addresses[place] = 0
    trace.live_count -= 1


cdef uint32_t take_slot(AllocationTrace trace, uint32_t event) noexcept nogil:
    cdef uint32_t slot = trace.free_slot
    cdef void *grown
    if slot != NO_SLOT:
        trace.free_slot = trace.slots[slot]
    else:
        if trace.slot_count == trace.slot_capacity:
            grown = realloc(trace.slots, max(<size_t> 1024, 2 * <size_t> trace.slot_capacity) * sizeof(uint32_t))
            if grown == NULL:
                return NO_SLOT
            trace.slots = <uint32_t *> grown
            trace.slot_capacity = max(1024, 2 * trace.slot_capacity)
        slot = trace.slot_count
        trace.slot_count += 1
    trace.slots[slot] = event
    return slot


cdef object bad_line(AllocationTrace trace, uint64_t line, str reason):
    return InvalidConfigError(f"{trace.source}, line {line}: {reason}", operation="read_log")


# The trace ------------------------------------------------------------------------------------------------


@cython.final
cdef class AllocationTrace:
    """AllocationTrace(source="a log")

    The events of a log, in its order, with each free joined to its allocation; what :func:`kina.memory.read_log` gives.

    Parameters
    ----------
    source : str
        What messages call it.

    Notes
    -----
    An event takes 32 bytes. As a buffer it is those records; ``numpy.frombuffer(trace, kina.memory.log_reader.EVENT)``
    reads them in place.
    """

    def __cinit__(self, source: str = "a log"):
        if not isinstance(source, str):
            raise ArgumentError(f"AllocationTrace: source is a str, not {type(source).__name__}",
                                operation="AllocationTrace")
        self.source = source
        self.rest = b""
        self.free_slot = NO_SLOT

    def __dealloc__(self):
        free(self.events)
        free(self.slots)
        free(self.live_addresses)
        free(self.live_slots)
        free(self.threads.names)
        free(self.threads.places)
        free(self.streams.names)
        free(self.streams.places)

    def feed(self, data: bytes) -> None:
        """Read on: `data` is the next piece of the file, of any length.

        Raises
        ------
        InvalidConfigError
            A line is no line of such a log; the message says which and why.
        SessionClosedError
            :meth:`finish` was called.
        """
        cdef const char *text
        cdef Py_ssize_t length, used
        if self.finished:
            raise SessionClosedError(f"{self.source}: it is read to its end already", operation="read_log")
        if not isinstance(data, bytes):
            raise ArgumentError(f"feed: bytes are needed, not {type(data).__name__}", operation="read_log")
        if self.rest:
            data = self.rest + data
        text, length = PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)
        with nogil:
            used = self.read(text, length)
        if used == -1:
            raise bad_line(self, self.line, self.reason.decode())
        self.rest = data[used:]
        if len(self.rest) > LONGEST_LINE:
            raise bad_line(self, self.line + 1, f"it is longer than {LONGEST_LINE} bytes")

    def finish(self, cut: bool = False) -> None:
        """The file ends here; `cut` says that it ends too early. A last line without its newline is left out.

        Raises
        ------
        InvalidConfigError
            There is no header.
        """
        if self.finished:
            return
        if self.line == 0:
            raise bad_line(self, 1, "there is no header")
        self.cut = bool(cut) or self.rest != b""
        self.rest = b""
        self.finished = True
        free(self.live_addresses)
        free(self.live_slots)
        self.live_addresses, self.live_slots = NULL, NULL

    cdef Py_ssize_t read(self, const char *text, Py_ssize_t length) except? -2 nogil:
        """How much of `text` is used; -1 after a line that cannot be read, with its reason."""
        cdef const char *start = text
        cdef const char *limit = text + length
        cdef const char *end
        cdef const char *seen
        cdef bint quoted
        while text < limit:
            end = text
            seen = text
            quoted = False
            while True:
                end = <const char *> memchr(end, c"\n", limit - end)
                if end == NULL:
                    return text - start
                if self.has_more_columns:  # what is quoted may hold newlines
                    while seen < end:
                        quoted ^= seen[0] == c'"'
                        seen += 1
                    if quoted:
                        end += 1
                        continue
                break
            self.line += 1
            if not self.read_line(text, end - 1 if end > text and (end - 1)[0] == c"\r" else end):
                return -1
            text = end + 1
        return length

    cdef int read_line(self, const char *text, const char *end) noexcept nogil:
        cdef const char *fields[6]
        cdef const char *ends[6]
        cdef const char *comma
        cdef int column
        cdef int64_t number
        cdef uint64_t pointer = 0
        cdef size_t capacity
        cdef void *grown
        cdef trace_event *event
        if self.line == 1:
            number = 38  # of the header
            if end - text < number or memcmp(text, <const char *> b"Thread,Time,Action,Pointer,Size,Stream", number) \
                    or (end - text > number and text[number] != c","):
                self.reason = b"the header is not Thread,Time,Action,Pointer,Size,Stream: this is no log of allocations"
                return False
            self.has_more_columns = end - text > number
            return True
        if text == end:
            return True
        for column in range(COLUMNS):
            if text == NULL:
                self.reason = b"it has fewer columns than Thread,Time,Action,Pointer,Size,Stream"
                return False
            comma = <const char *> memchr(text, c",", end - text)
            fields[column] = text
            ends[column] = end if comma == NULL else comma
            text = comma + 1 if comma != NULL else comma
        if text != NULL and not self.has_more_columns:
            self.reason = b"it has more columns than the header"
            return False
        if self.count == self.capacity:
            if self.count >= (<size_t> 1 << 31):
                self.reason = b"a trace holds no more than 2**31 events"
                return False
            capacity = max(<size_t> 4096, self.capacity + self.capacity // 2)
            grown = realloc(self.events, capacity * sizeof(trace_event))
            if grown == NULL:
                self.reason = NO_MEMORY
                return False
            self.events = <trace_event *> grown
            self.capacity = capacity
        event = &self.events[self.count]
        memset(event, 0, sizeof(event[0]))
        event.line = <uint32_t> self.line
        number = number_of_name(&self.threads, fields[0], ends[0])
        if number < 0:
            self.reason = b"Thread is empty or longer than 47 characters"
            return False
        event.thread = <uint32_t> number
        number = number_of_name(&self.streams, fields[5], ends[5])
        if number < 0:
            self.reason = b"Stream is empty or longer than 47 characters"
            return False
        if number > 0xffff:
            self.reason = b"it names the 65537th stream"
            return False
        event.stream = <uint16_t> number
        if not self.read_time(fields[1], ends[1], &event.time_us):
            self.reason = b"Time is neither HH:MM:SS.ffffff nor seconds"
            return False
        if not read_address(fields[3], ends[3], &pointer):
            self.reason = b"Pointer is no hexadecimal number of up to 64 bits"
            return False
        if not read_decimal(fields[4], ends[4], &event.nbytes):
            self.reason = b"Size is no number of bytes from 0 to 2**63 - 1"
            return False
        number = ends[2] - fields[2]
        if number == 8 and memcmp(fields[2], b"allocate", 8) == 0:
            event.action = TRACE_ALLOCATE
        elif (number == 4 and memcmp(fields[2], b"free", 4) == 0) or (
                number == 10 and memcmp(fields[2], b"deallocate", 10) == 0):
            event.action = TRACE_FREE
        elif number == 16 and memcmp(fields[2], b"allocate failure", 16) == 0:
            event.action = TRACE_FAILURE
        else:
            self.reason = b"Action is none of allocate, free, deallocate, allocate failure"
            return False
        if not self.settle(event, pointer):
            return False
        self.count += 1
        return True

    cdef int settle(self, trace_event *event, uint64_t pointer) noexcept nogil:
        cdef size_t place
        if event.action == TRACE_FAILURE:
            return True
        if event.nbytes == 0:
            event.action = TRACE_EMPTY
            return True
        if 2 * (self.live_count + 1) > self.live_capacity and not grow_live(self):
            self.reason = NO_MEMORY
            return False
        place = place_of_address(self.live_addresses, self.live_capacity, pointer)
        if event.action == TRACE_ALLOCATE:
            if pointer == 0:
                self.reason = b"bytes were allocated at address 0"
                return False
            if self.live_addresses[place] != 0:
                self.reason = b"its address is live already: lines before it, such as its free, are missing"
                return False
            event.slot = take_slot(self, <uint32_t> self.count)
            if event.slot == NO_SLOT:
                self.reason = NO_MEMORY
                return False
            self.live_addresses[place] = pointer
            self.live_slots[place] = event.slot
            self.live_count += 1
            self.live_bytes += event.nbytes
            if self.live_bytes > self.peak_bytes:
                self.peak_bytes = self.live_bytes
                self.peak_event = self.count
        elif pointer == 0 or self.live_addresses[place] == 0:
            event.action = TRACE_UNKNOWN_FREE
        else:
            event.slot = self.live_slots[place]
            if event.nbytes != self.events[self.slots[event.slot]].nbytes:
                self.wrong_sizes += 1
                event.nbytes = self.events[self.slots[event.slot]].nbytes
            self.live_bytes -= event.nbytes
            remove_live(self, place)
            self.slots[event.slot] = self.free_slot
            self.free_slot = event.slot
        return True

    cdef int read_time(self, const char *text, const char *end, int64_t *out) noexcept nogil:
        """Microseconds. A clock that jumps back by more than half a day has passed midnight."""
        cdef int64_t number = 0, unit = 1_000_000
        cdef bint clock = end - text >= 8 and text[2] == c":" and text[5] == c":"
        cdef const char *digits = text
        if clock:
            number = 10 * (text[0] - c"0") + (text[1] - c"0")
            number = 60 * number + 10 * (text[3] - c"0") + (text[4] - c"0")
            number = 60 * number + 10 * (text[6] - c"0") + (text[7] - c"0")
            digits = text + 8
            while text < digits:
                if not (c"0" <= text[0] <= c"9" or text[0] == c":"):
                    return False
                text += 1
        else:
            while digits < end and c"0" <= digits[0] <= c"9":
                number = 10 * number + (digits[0] - c"0")
                digits += 1
            if digits == text or digits - text > 12:
                return False
        number *= 1_000_000
        if digits < end:
            if digits[0] != c"." and not (clock and digits[0] == c":"):
                return False
            digits += 1
            if digits == end:
                return False
            while digits < end:
                if not c"0" <= digits[0] <= c"9":
                    return False
                unit //= 10
                number += (digits[0] - c"0") * unit
                digits += 1
        if clock:
            number += self.day_us
            if number + DAY_US // 2 < self.last_us:
                number += DAY_US
                self.day_us += DAY_US
            elif number - DAY_US // 2 > self.last_us and number >= DAY_US:
                number -= DAY_US  # a straggler of the day before
            self.last_us = number
        out[0] = number
        return True

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.finished:
            raise BufferError(f"{self.source} is not read to its end")
        PyBuffer_FillInfo(view, self, self.events, <Py_ssize_t> (self.count * sizeof(trace_event)), 1, flags)

    def __len__(self) -> int:
        return self.count

    def outstanding(self) -> array:
        """The numbers of the events that allocated what was never freed, in the log's order: an array of uint32."""
        cdef uint32_t number
        cdef bytearray freed = bytearray(self.slot_count)
        cdef uint32_t slot = self.free_slot
        while slot != NO_SLOT:
            freed[slot] = 1
            slot = self.slots[slot]
        return array("I", sorted([self.slots[number] for number in range(self.slot_count) if not freed[number]]))

    @property
    def name(self) -> str:
        """What messages call the log."""
        return self.source

    @property
    def thread_names(self) -> tuple[str, ...]:
        """The threads as the log names them; an event has the place of its own."""
        return names_of(&self.threads)

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The streams as the log names them; an event has the place of its own."""
        return names_of(&self.streams)

    @property
    def was_cut(self) -> bool:
        """Whether the file ends within a line, or its compressed data too early."""
        return self.cut

    @property
    def peak_live_bytes(self) -> int:
        """The most bytes that were live at once, as they were asked for."""
        return self.peak_bytes

    @property
    def peak_live_event(self) -> int:
        """The number of the event that brought them about."""
        return self.peak_event

    @property
    def live_at_end_bytes(self) -> int:
        """Bytes that were never freed."""
        return self.live_bytes

    @property
    def live_at_end_count(self) -> int:
        """Allocations that were never freed."""
        return self.live_count

    @property
    def wrong_size_count(self) -> int:
        """Frees that told another size than their allocation."""
        return self.wrong_sizes
