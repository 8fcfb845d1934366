# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Storage and retirement under threads that Python has never seen, on the simulated driver.

Each thread has a Runtime to itself, and does in an order drawn from the seed what sessions do: it allocates in the
order of its stream, adopts, fills, copies, looks at memory, hands it to other threads, which adopt it, exports it,
drops it, seals, harvests, waits, and leaves the Runtime in the middle of things for the next one. Its streams stand
still now and then, so that the device is far behind. Two threads more have no Runtime and no current context: they
drop what they find and harvest.

Memory carries the stamp of whoever filled it last. A look copies some of it to the host in the order of a stream, and
is compared once a seal behind it is complete. Blocks of the stress itself are used by the next thread, in no order,
the moment they come back: one that comes back too soon shows as a wrong stamp, and as a race under TSan.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport fprintf, stderr
from libc.stdlib cimport abort, calloc, free, malloc
from libc.string cimport memset

from kina._core.resource cimport MemoryResource
from kina._core.status cimport KINA_OUT_OF_MEMORY, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_RESOURCE_VERSION,
    KINA_STORAGE_ADOPTED,
    kina_dl_device,
    kina_handle,
    kina_handle_init,
    kina_release,
    kina_resource,
    kina_resource_vtable,
    kina_retain,
    kina_storage,
    kina_stream,
    storage_adopt,
    storage_allocate,
)
from kina.cuda.context cimport context_begin, context_end, open_device, session_enter, session_leave, this_thread
from kina.cuda.cudatypes cimport (
    CU_MEMHOSTALLOC_PORTABLE,
    CU_STREAM_LEGACY,
    CU_STREAM_NON_BLOCKING,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUevent,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu
from kina.cuda.event cimport order_streams, seal_query, seal_record, seal_wait
from kina.cuda.foreign_uses cimport FOREIGN_USE_LEGACY, FOREIGN_USE_UNKNOWN, note_use
from kina.cuda.handles cimport (
    kina_add,
    kina_device,
    kina_load_u64,
    kina_runtime,
    kina_seal,
    kina_segment,
    kina_session_node,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)
from kina.cuda.retire cimport (
    harvest,
    harvest_device,
    harvest_retired,
    lease,
    orphan_segments,
    retire_storage,
    seal,
    seal_if_full,
    seal_if_urgent,
    synchronize,
    wait_for_oldest,
    wait_for_retired,
)
from kina.cuda.runtime cimport Runtime


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_attr_t
    ctypedef unsigned long pthread_t
    int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *) noexcept nogil,
                       void *argument) noexcept
    int pthread_join(pthread_t thread, void **result) noexcept


cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int us) noexcept


cdef extern from "control.h" nogil:
    int kina_sim_stall(void *stream) noexcept
    int kina_sim_resume(void *stream) noexcept


cdef enum:
    THREADS = 8             # at most
    JANITORS = 2
    LIVES = 4               # Runtimes of a thread, one after the other
    HELD = 8                # storages that a thread has at once
    EXCHANGED = 12          # and that are on their way to another
    LOOKS = 64              # of a thread that are not compared yet
    LOOK_WORDS = 16         # that a look copies to the host
    BLOCKS = 40
    BLOCK_BYTES = 64 << 10


ctypedef struct block:
    block *next  # free
    CUdeviceptr data
    int64_t out

ctypedef struct piece:
    kina_storage *storage  # owned; NULL: an empty place. Its stream is its holder's
    uint32_t stamp
    bint fixed       # others may read it too, so that nobody writes any more
    kina_seal *last  # on the way: behind all work of the giver; NULL: the giver's stream is asked

ctypedef struct look:
    kina_seal *seal  # owned; NULL: not sealed yet
    uint32_t stamp
    uint32_t words

ctypedef struct worker:
    uint64_t drawn
    kina_runtime *lives[LIVES]  # owned
    kina_runtime *runtime
    CUstream stream
    CUstream foreign  # of another library
    bint stalled
    int rounds
    piece held[HELD]
    look looks[LOOKS]
    uint64_t first, next  # of the looks
    uint32_t *seen        # pinned: LOOK_WORDS of each

cdef kina_device *device
cdef kina_dl_device where
cdef kina_resource *resources[3]
cdef kina_resource own
cdef kina_resource_vtable own_functions
cdef block blocks[BLOCKS]
cdef block *free_blocks
cdef piece exchanged[EXCHANGED]
cdef pthread_mutex_t mutex  # of the blocks and what is exchanged
cdef worker workers[THREADS]
cdef worker janitors[JANITORS]
cdef uint64_t unfinished, queries
cdef CUresult (*query_event)(CUevent) noexcept nogil
cdef uint64_t stamps, allocated, adopted, looked, given, exported, leases, seals


cdef void expect(bint good, const char *what) noexcept nogil:
    if not good:
        fprintf(stderr, "retire_stress: %s (%s)\n", what, <char *> last_error().message)
        abort()


cdef void works(CUresult code, const char *what) noexcept nogil:
    if code != CUDA_SUCCESS:
        fprintf(stderr, "retire_stress: %s: the driver answered %d\n", what, <int> code)
        abort()


cdef CUresult answer_late(CUevent event) noexcept nogil:
    """cuEventQuery; now and then much has happened before whoever asked goes on."""
    cdef CUresult code = query_event(event)
    if kina_add(&queries, 1) % 16 == 0:
        usleep(500)
    return code


cdef uint32_t draw(worker *mine, uint32_t below) noexcept nogil:
    mine.drawn = mine.drawn * 6364136223846793005ULL + 1442695040888963407ULL
    return <uint32_t> (mine.drawn >> 33) % below


# Blocks: memory that goes to anybody the moment it is given back ------------------------------------------


cdef block *take_block() noexcept nogil:
    cdef block *taken
    global free_blocks
    pthread_mutex_lock(&mutex)
    taken = free_blocks
    if taken != NULL:
        free_blocks = taken.next
        expect(taken.out == 0, b"a block that is out was free")
        taken.out = 1
    pthread_mutex_unlock(&mutex)
    return taken


cdef void give_block(void *owner) noexcept nogil:
    cdef block *given_back = <block *> owner
    global free_blocks
    pthread_mutex_lock(&mutex)
    expect(given_back.out == 1, b"a block was released twice")
    given_back.out = 0
    given_back.next = free_blocks
    free_blocks = given_back
    pthread_mutex_unlock(&mutex)


cdef int own_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef block *taken = take_block()
    if taken == NULL:
        return KINA_OUT_OF_MEMORY
    out[0] = <void *> taken.data
    return 0


cdef void own_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    give_block(&blocks[(<CUdeviceptr> data - blocks[0].data) // BLOCK_BYTES])


cdef void own_stays(kina_handle *handle) noexcept nogil:
    expect(False, b"a reference too many to the resource was dropped")


# Streams and looks ----------------------------------------------------------------------------------------


cdef void stall(worker *mine) noexcept nogil:
    mine.stalled = True
    kina_sim_stall(mine.stream)
    kina_sim_stall(mine.foreign)


cdef void calm(worker *mine) noexcept nogil:
    """Before whatever may wait: others may wait for these streams, and this thread for them."""
    if mine.stalled:
        mine.stalled = False
        kina_sim_resume(mine.stream)
        kina_sim_resume(mine.foreign)


cdef kina_seal *seal_looks(worker *mine) noexcept nogil:
    cdef kina_seal *sealed = NULL
    cdef look *each
    cdef uint64_t i
    expect(seal(mine.runtime, &sealed) == 0, b"seal")
    for i in range(mine.first, mine.next):
        each = &mine.looks[i % LOOKS]
        if each.seal == NULL:
            kina_retain(sealed)
            each.seal = sealed
    return sealed


cdef void compare(worker *mine, bint all) noexcept nogil:
    """The looks whose seals are complete; `all`: the host waits for the others."""
    cdef look *each
    cdef uint32_t *words
    cdef uint32_t i
    if all:
        calm(mine)
    while mine.first != mine.next:
        each = &mine.looks[mine.first % LOOKS]
        if each.seal == NULL:
            if not all:
                return
            kina_release(seal_looks(mine))
        if seal_query(each.seal) != 1:
            if not all:
                return
            expect(seal_wait(each.seal, b"look") == 0, b"wait for a look")
        words = mine.seen + mine.first % LOOKS * LOOK_WORDS
        for i in range(each.words):
            if words[i] != each.stamp:
                fprintf(stderr, "retire_stress: memory stamped %u held %u\n", each.stamp, words[i])
                abort()
        kina_release(each.seal)
        mine.first += 1
        kina_add(&looked, 1)


# What a thread does ---------------------------------------------------------------------------------------


cdef void use(worker *mine, kina_storage *storage) noexcept nogil:
    if storage.flags & KINA_STORAGE_ADOPTED:
        expect(lease(mine.runtime, storage, draw(mine, 2)) == 0, b"lease")


cdef void fill(worker *mine, piece *filled) noexcept nogil:
    cdef kina_storage *storage = filled.storage
    filled.stamp = <uint32_t> kina_add(&stamps, 1)
    if storage.nbytes == 0:
        return
    use(mine, storage)
    works(cu.cuMemsetD32Async(<CUdeviceptr> storage.data, filled.stamp, storage.nbytes // 4, mine.stream), b"fill")
    seal_if_full(mine.runtime)


cdef void look_at(worker *mine, piece *seen, CUstream stream) noexcept nogil:
    """In the order of `stream`, which is ordered behind the piece's."""
    cdef kina_storage *storage = seen.storage
    cdef uint32_t total = <uint32_t> (storage.nbytes // 4)
    cdef uint32_t words = min(total, <uint32_t> LOOK_WORDS)
    cdef look *made
    cdef CUdeviceptr source
    if words == 0:
        return
    if mine.next - mine.first == LOOKS:
        compare(mine, True)
    if stream == mine.stream:
        use(mine, storage)
    source = <CUdeviceptr> storage.data + 4 * draw(mine, total - words + 1)
    works(cu.cuMemcpyDtoHAsync(mine.seen + mine.next % LOOKS * LOOK_WORDS, source, 4 * words, stream), b"look")
    made = &mine.looks[mine.next % LOOKS]
    made.seal = NULL
    made.stamp = seen.stamp
    made.words = words
    mine.next += 1
    if stream == mine.stream:
        seal_if_full(mine.runtime)
    else:
        expect(seal_record(device, stream, &made.seal, b"look") == 0, b"seal of another stream")


cdef int allocate(worker *mine, piece *made, kina_resource *resource, size_t nbytes) noexcept nogil:
    cdef kina_stream *stream = &mine.runtime.stream
    cdef bint unordered = not resource.vtable.supports_streams
    cdef int status
    if unordered:
        calm(mine)
        harvest_retired(device, False)
    status = storage_allocate(&made.storage, resource, stream, nbytes, where, stream.runtime, stream.domain)
    while status == KINA_OUT_OF_MEMORY and unordered and wait_for_retired(device) == 0:
        status = storage_allocate(&made.storage, resource, stream, nbytes, where, stream.runtime, stream.domain)
    if status == KINA_OUT_OF_MEMORY and resource == &own:
        return 1  # all blocks are in use
    expect(status == 0, b"allocate")
    if unordered:
        made.storage.before_release = retire_storage
    made.fixed = False
    kina_add(&allocated, 1)
    return 0


cdef void begin(worker *mine, piece *made) noexcept nogil:
    cdef uint32_t which = draw(mine, 12)
    cdef size_t nbytes = 4 * draw(mine, 1 + (1 << draw(mine, 15)))
    if which < 5:
        if allocate(mine, made, resources[min(which, <uint32_t> 2)], nbytes) == 0:
            fill(mine, made)
    elif which < 9:
        allocate(mine, made, mine.runtime.memory, nbytes)
        fill(mine, made)
    else:
        adopt_block(mine, made)


cdef void adopt_block(worker *mine, piece *made) noexcept nogil:
    cdef kina_stream *stream = &mine.runtime.stream
    cdef block *taken = take_block()
    if taken == NULL:
        return
    expect(storage_adopt(&made.storage, <void *> taken.data, BLOCK_BYTES, where, stream, stream.runtime, stream.domain,
                         0, give_block, taken) == 0, b"adopt")
    made.fixed = False
    kina_add(&adopted, 1)
    fill(mine, made)


cdef void copy(worker *mine, piece *source, piece *made) noexcept nogil:
    cdef kina_storage *storage = source.storage
    if made.storage != NULL:
        return
    allocate(mine, made, mine.runtime.memory, storage.nbytes)
    made.stamp = source.stamp
    if storage.nbytes == 0:
        return
    use(mine, storage)
    works(cu.cuMemcpyDtoDAsync(<CUdeviceptr> made.storage.data, <CUdeviceptr> storage.data, storage.nbytes,
                               mine.stream), b"copy")
    seal_if_full(mine.runtime)


cdef void give(worker *mine, piece *source) noexcept nogil:
    """To whoever finds it, in the order of a seal or of the stream; a part of the pieces stays here as well."""
    cdef piece *place = &exchanged[draw(mine, EXCHANGED)]
    cdef bint shared = draw(mine, 3) == 0
    cdef bint placed
    cdef piece gift
    source.fixed = source.fixed or shared
    gift = source[0]
    gift.last = NULL
    if draw(mine, 2):
        gift.last = seal_looks(mine)
    kina_retain(gift.storage)
    pthread_mutex_lock(&mutex)
    placed = place.storage == NULL
    if placed:
        place[0] = gift
    pthread_mutex_unlock(&mutex)
    if not placed:
        kina_release(gift.last)
        kina_release(gift.storage)
        return
    kina_add(&given, 1)
    if not shared:
        drop(source)


cdef void take(worker *mine, piece *found) noexcept nogil:
    cdef piece *place = &exchanged[draw(mine, EXCHANGED)]
    pthread_mutex_lock(&mutex)
    found[0] = place[0]
    place.storage = NULL
    pthread_mutex_unlock(&mutex)


cdef void receive(worker *mine, piece *found) noexcept nogil:
    """As a session adopts a tensor of another Runtime."""
    cdef kina_stream *stream = &mine.runtime.stream
    cdef kina_storage *source
    cdef kina_storage *theirs
    take(mine, found)
    source = found.storage
    if source == NULL:
        return
    if found.last != NULL:
        expect(stream.ordering.order(stream, &found.last.handle) == 0, b"order behind a seal")
        kina_release(found.last)
    elif source.stream != stream:
        expect(order_streams(device, <CUstream> source.stream.native, mine.stream, b"receive") == 0,
               b"order behind a stream")
    if source.runtime == stream.runtime:
        return
    theirs = source
    while (theirs.flags & KINA_STORAGE_ADOPTED
           and theirs.release_owner == <void (*)(void *) noexcept nogil> kina_release):
        theirs = <kina_storage *> theirs.owner
    kina_retain(theirs)
    if theirs.runtime == stream.runtime:
        found.storage = theirs
    else:
        expect(storage_adopt(&found.storage, theirs.data, theirs.nbytes, where, stream, stream.runtime, stream.domain,
                             theirs.flags & ~KINA_STORAGE_ADOPTED, kina_release, theirs) == 0, b"adopt")
    kina_release(source)


cdef void export(worker *mine, piece *source) noexcept nogil:
    """As DLPack does; the consumer reads in its own order, and is heard of no more."""
    cdef kina_storage *storage = source.storage
    cdef CUstream consumer = CU_STREAM_LEGACY if draw(mine, 2) else mine.foreign
    source.fixed = True
    expect(order_streams(device, mine.stream, consumer, b"export") == 0, b"order of an export")
    note_use(storage, FOREIGN_USE_LEGACY if consumer == CU_STREAM_LEGACY else FOREIGN_USE_UNKNOWN)
    look_at(mine, source, consumer)
    kina_add(&exported, 1)


cdef void drop(piece *dropped) noexcept nogil:
    kina_release(dropped.storage)
    dropped.storage = NULL


cdef void act(worker *mine, piece *chosen) noexcept nogil:
    cdef uint32_t what = draw(mine, 32)
    if chosen.storage == NULL:
        if what < 12:
            receive(mine, chosen)
        else:
            begin(mine, chosen)
    elif what < 5:
        if not chosen.fixed:
            fill(mine, chosen)
    elif what < 13:
        look_at(mine, chosen, mine.stream)
    elif what < 20:
        give(mine, chosen)
    elif what < 23:
        copy(mine, chosen, &mine.held[draw(mine, HELD)])
    elif what < 27:
        export(mine, chosen)
    else:
        drop(chosen)


cdef void tend(worker *mine) noexcept nogil:
    """Now and then, what moves retirement on."""
    cdef uint32_t what = draw(mine, 64)
    if what < 4:
        kina_release(seal_looks(mine))
    elif what < 6:
        expect(seal_if_urgent(mine.runtime) == 0, b"seal what is urgent")
    elif what < 9:
        harvest(mine.runtime)
    elif what < 10:
        harvest_device(device)
    elif what < 13:
        compare(mine, False)
    elif what < 14:
        calm(mine)
        expect(wait_for_oldest(mine.runtime) >= 0, b"wait for the oldest")
    elif what < 15:
        calm(mine)
        expect(wait_for_retired(device) >= 0, b"wait for what was dropped")
    elif what < 17:
        calm(mine)
        expect(synchronize(mine.runtime) == 0, b"synchronize")
    elif what < 22 and not mine.stalled:
        stall(mine)


cdef void live(worker *mine, kina_runtime *runtime) noexcept nogil:
    cdef kina_session_node *node = session_enter(runtime)
    cdef int i, _round, pushed
    expect(node != NULL, b"enter")
    mine.runtime = runtime
    mine.stream = <CUstream> runtime.stream.native
    for _round in range(mine.rounds):
        act(mine, &mine.held[draw(mine, HELD)])
        tend(mine)
    calm(mine)
    stall(mine)
    for i in range(HELD):
        if mine.held[i].storage != NULL:
            look_at(mine, &mine.held[i], mine.stream)
    kina_release(seal_looks(mine))
    for i in range(HELD):
        if mine.held[i].storage != NULL and not mine.held[i].fixed:
            fill(mine, &mine.held[i])  # leases that nobody seals any more
        drop(&mine.held[i])
    expect(session_leave(this_thread(), node) == 0, b"leave")
    pushed = context_begin(device, b"end")
    orphan_segments(runtime, pushed >= 0)
    context_end(pushed)
    expect(runtime.open == NULL and kina_load_u64(&runtime.counters.leaked) == 0, b"leases were leaked")
    kina_add(&leases, kina_load_u64(&runtime.counters.leases))
    kina_add(&seals, kina_load_u64(&runtime.counters.seals))
    kina_release(runtime)
    usleep(draw(mine, 500))  # others come by
    calm(mine)


cdef void *work(void *argument) noexcept nogil:
    cdef worker *mine = <worker *> argument
    cdef int i
    for i in range(LIVES):
        live(mine, mine.lives[i])
    compare(mine, True)
    kina_add(&unfinished, <uint64_t> -1)
    return NULL


cdef void *tidy(void *argument) noexcept nogil:
    """Anybody may drop and harvest."""
    cdef worker *mine = <worker *> argument
    cdef piece found
    while kina_load_u64(&unfinished) > 0:
        take(mine, &found)
        if found.storage != NULL:
            kina_release(found.last)
            drop(&found)
        harvest_device(device)
        usleep(draw(mine, 100))
    return NULL


# What Python calls ----------------------------------------------------------------------------------------


cdef void make_blocks() noexcept nogil:
    cdef CUdeviceptr arena = 0
    cdef int i
    works(cu.cuMemAlloc(&arena, BLOCKS * BLOCK_BYTES), b"blocks")
    for i in range(BLOCKS):
        blocks[i].data = arena + i * BLOCK_BYTES
        blocks[i].out = 1
        give_block(&blocks[i])
    memset(&own, 0, sizeof(own))
    kina_handle_init(&own.handle, own_stays)
    own_functions.version = KINA_RESOURCE_VERSION
    own_functions.name = b"blocks"
    own_functions.allocate = own_allocate
    own_functions.deallocate = own_deallocate
    own.vtable = &own_functions
    own.device_type = KINA_DEVICE_CUDA
    resources[2] = &own


cdef void make_worker(worker *mine, uint64_t seed, int rounds) noexcept nogil:
    mine.drawn = seed
    mine.rounds = rounds
    works(cu.cuStreamCreateWithPriority(&mine.foreign, CU_STREAM_NON_BLOCKING, 0), b"a foreign stream")
    works(cu.cuMemHostAlloc(<void **> &mine.seen, 4 * LOOKS * LOOK_WORDS, CU_MEMHOSTALLOC_PORTABLE), b"pinned memory")


cdef void run(int threads) noexcept nogil:
    cdef pthread_t started[THREADS + JANITORS]
    cdef int i
    global unfinished
    unfinished = threads
    for i in range(threads):
        expect(pthread_create(&started[i], NULL, work, &workers[i]) == 0, b"no thread")
    for i in range(JANITORS):
        expect(pthread_create(&started[threads + i], NULL, tidy, &janitors[i]) == 0, b"no thread")
    for i in range(threads + JANITORS):
        pthread_join(started[i], NULL)


def stress(MemoryResource asynchronous not None, MemoryResource plain not None, int threads, int generations,
           int rounds, uint64_t seed):
    """Run `generations` times `threads` threads of so many rounds on each of two Runtimes. Ends the process if
    something is wrong; returns how often what was done. All that is left is what waits for the device, after which
    `finish` looks."""
    global device, query_event
    cdef Runtime made
    cdef int pushed, _generation, i, life
    assert 0 < threads <= THREADS
    device = open_device(0)
    where.device_type = KINA_DEVICE_CUDA
    where.device_id = 0
    resources[0] = asynchronous.ready()
    resources[1] = plain.ready()
    pthread_mutex_init(&mutex, NULL)
    for i in range(JANITORS):
        janitors[i].drawn = seed + i
    query_event = cu.cuEventQuery
    cu.cuEventQuery = answer_late
    pushed = context_begin(device, b"stress")
    make_blocks()
    for i in range(threads):
        make_worker(&workers[i], seed * 1000 + i + 1, rounds)
    for _generation in range(generations):
        for i in range(threads):
            for life in range(LIVES):
                made = Runtime(0)
                workers[i].lives[life] = made.c
                kina_retain(made.c)
                made = None
        with nogil:
            run(threads)
    with nogil:
        for i in range(EXCHANGED):
            if exchanged[i].storage != NULL:
                kina_release(exchanged[i].last)
                drop(&exchanged[i])
        for i in range(threads):
            works(cu.cuStreamDestroy(workers[i].foreign), b"destroy a foreign stream")
            works(cu.cuMemFreeHost(workers[i].seen), b"free pinned memory")
    context_end(pushed)  # (The table stays as it is: the reaper reads it at any time.)
    return {"allocated": allocated, "adopted": adopted, "looked": looked, "given": given, "exported": exported,
            "leases": leases, "seals": seals}


def finish():
    """Once the device was waited for: everything came back."""
    cdef block *each = free_blocks
    cdef int free_count = 0
    cdef int pushed
    while each != NULL:
        free_count += 1
        each = each.next
    expect(free_count == BLOCKS, b"a block did not come back")
    expect(own.handle.references == 1, b"a storage still refers to the resource")
    expect(device.orphans == NULL and device.retired == NULL and device.quarantine == NULL, b"something still waits")
    expect(device.runtimes == NULL, b"a Runtime is left")
    pushed = context_begin(device, b"finish")
    works(cu.cuMemFree(blocks[0].data), b"free the blocks")
    context_end(pushed)


# A harvest that is late -----------------------------------------------------------------------------------

cdef uint64_t asked, answered
cdef CUresult (*exchange_mode)(CUstreamCaptureMode *) noexcept nogil
cdef kina_runtime *harvested


cdef void fill_bins(size_t nbytes) noexcept nogil:
    """What the C library keeps of freed blocks before it hands out the newest one again, is full."""
    cdef void *kept[16]
    cdef int i
    for i in range(16):
        kept[i] = malloc(nbytes)
    for i in range(16):
        free(kept[i])


cdef CUresult answer_when_told(CUevent event) noexcept nogil:
    cdef CUresult code = query_event(event)
    if kina_add(&asked, 1) == 1:
        while kina_load_u64(&answered) == 0:
            usleep(100)
    return code


cdef CUresult exchange_and_fill_bins(CUstreamCaptureMode *mode) noexcept nogil:
    """The last call of the driver before a harvest frees a segment: its memory will be the next segment's."""
    cdef CUresult code = exchange_mode(mode)
    fill_bins(sizeof(kina_segment))
    return code


cdef void *harvest_late(void *argument) noexcept nogil:
    harvest(harvested)
    return NULL


cdef void make_next(void *wanted, size_t nbytes) noexcept nogil:
    """The free block that the C library hands out next is the wanted one, if it is to be had; what comes before it is
    taken for good."""
    cdef void *taken
    cdef int _each
    for _each in range(64):
        taken = calloc(1, nbytes)
        if taken == wanted:
            free(taken)
            return


def late_harvest():
    """A thread finds the oldest seal complete, and goes on when that segment is long gone and the next one, which is
    not complete, may have its address. Returns whether it has, and whether that one kept its lease."""
    global device, harvested, query_event, exchange_mode
    cdef Runtime runtime = Runtime(0)
    cdef kina_handle leased
    cdef kina_segment *gone
    cdef pthread_t thread
    cdef int pushed
    cdef bint reused
    device = open_device(0)
    harvested = runtime.c
    kina_handle_init(&leased, own_stays)
    query_event = cu.cuEventQuery
    exchange_mode = cu.cuThreadExchangeStreamCaptureMode
    with nogil:
        pushed = context_begin(device, b"late harvest")
        expect(lease(harvested, &leased, False) == 0 and seal(harvested, NULL) == 0, b"seal")
        works(cu.cuStreamSynchronize(<CUstream> harvested.stream.native), b"synchronize")
        gone = harvested.oldest
        cu.cuEventQuery = answer_when_told
        cu.cuThreadExchangeStreamCaptureMode = exchange_and_fill_bins
        expect(pthread_create(&thread, NULL, harvest_late, NULL) == 0, b"no thread")
        while kina_load_u64(&asked) == 0:
            usleep(100)
        kina_sim_stall(harvested.stream.native)
        harvest(harvested)
        expect(harvested.oldest == NULL and leased.references == 1, b"a harvest that is not late")
        make_next(gone, sizeof(kina_segment))
        expect(lease(harvested, &leased, False) == 0 and seal(harvested, NULL) == 0, b"seal")
        reused = harvested.oldest == gone
        kina_add(&answered, 1)
        pthread_join(thread, NULL)
        cu.cuEventQuery = query_event
        cu.cuThreadExchangeStreamCaptureMode = exchange_mode
    kept = leased.references == 2
    with nogil:
        kina_sim_resume(harvested.stream.native)
        expect(synchronize(harvested) == 0, b"synchronize")
        context_end(pushed)
    return reused, kept


# Somebody looks, and somebody else needs memory -----------------------------------------------------------

cdef int waited
cdef uint64_t over


cdef void *look_slowly(void *argument) noexcept nogil:
    harvest_retired(device, True)
    return NULL


cdef void *need_memory(void *argument) noexcept nogil:
    global waited
    waited = wait_for_retired(device)
    kina_add(&over, 1)
    return NULL


def looked_at_meanwhile(MemoryResource plain not None):
    """A thread has all that was dropped and asks for the seals, while another one wants to wait for the oldest of it.
    Returns whether that one went on before the first was done, and what it was told: 1 is that there was nothing."""
    global device, query_event, asked, answered, over
    cdef Runtime runtime = Runtime(0)
    cdef kina_storage *dropped = NULL
    cdef pthread_t looking, needing
    cdef int pushed
    cdef bint early
    device = open_device(0)
    query_event = cu.cuEventQuery
    asked = answered = over = 0
    where.device_type = KINA_DEVICE_CUDA
    where.device_id = 0
    with nogil:
        pushed = context_begin(device, b"looked at")
        kina_sim_stall(runtime.c.stream.native)
        expect(storage_allocate(&dropped, plain.c, &runtime.c.stream, 1024, where, runtime.c.stream.runtime,
                                runtime.c.stream.domain) == 0, b"allocate")
        dropped.before_release = retire_storage
        kina_release(dropped)
        expect(device.retired != NULL, b"it is not retired")
        cu.cuEventQuery = answer_when_told
        expect(pthread_create(&looking, NULL, look_slowly, NULL) == 0, b"no thread")
        while kina_load_u64(&asked) == 0:
            usleep(100)
        expect(pthread_create(&needing, NULL, need_memory, NULL) == 0, b"no thread")
        usleep(100000)
        early = kina_load_u64(&over) != 0
        kina_add(&answered, 1)
        pthread_join(looking, NULL)
        kina_sim_resume(runtime.c.stream.native)
        pthread_join(needing, NULL)
        cu.cuEventQuery = query_event
        context_end(pushed)
    return early, waited
