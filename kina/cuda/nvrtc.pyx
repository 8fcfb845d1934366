"""NVRTC: the library that compiles CUDA C++, found when it is first needed.

Source: NVRTC documentation, "General Information Query" and "Compilation".
"""

import os
from typing import NamedTuple

from libc.stddef cimport size_t
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from kina.errors import CompileError, UnavailableError

__all__ = ["NvrtcLibrary", "compile_program", "nvrtc"]


cdef extern from "<dlfcn.h>" nogil:
    void *dlsym(void *library, const char *name) noexcept


ctypedef void *nvrtc_program

cdef enum:
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_OUT_OF_MEMORY = 1
    NVRTC_ERROR_INVALID_OPTION = 5
    NVRTC_ERROR_COMPILATION = 6

ctypedef struct nvrtc_functions:
    const char *(*error_string)(int) noexcept nogil
    int (*version)(int *, int *) noexcept nogil
    int (*supported_count)(int *) noexcept nogil
    int (*supported)(int *) noexcept nogil
    int (*create)(nvrtc_program *, const char *, const char *, int, const char **, const char **) noexcept nogil
    int (*destroy)(nvrtc_program *) noexcept nogil
    int (*add_name)(nvrtc_program, const char *) noexcept nogil
    int (*compile)(nvrtc_program, int, const char **) noexcept nogil
    int (*log_size)(nvrtc_program, size_t *) noexcept nogil
    int (*log)(nvrtc_program, char *) noexcept nogil
    int (*cubin_size)(nvrtc_program, size_t *) noexcept nogil
    int (*cubin)(nvrtc_program, char *) noexcept nogil
    int (*ptx_size)(nvrtc_program, size_t *) noexcept nogil
    int (*ptx)(nvrtc_program, char *) noexcept nogil
    int (*lowered)(nvrtc_program, const char *, const char **) noexcept nogil


cdef nvrtc_functions functions
cdef object found = None  # the NvrtcLibrary


class NvrtcLibrary(NamedTuple):
    """The library that is used, once it is loaded.

    Attributes
    ----------
    path : str
        Its file.
    version : tuple of int
        (major, minor) of its CUDA toolkit.
    identity : tuple of int
        Size in bytes and time of change in ns of the file: another build is another compiler.
    architectures : tuple of int
        What it compiles for, ascending: 90 for ``compute_90``.
    """

    path: str
    version: tuple[int, int]
    identity: tuple[int, int]
    architectures: tuple[int, ...]


def nvrtc() -> NvrtcLibrary:
    """Find and load the library: a copy that is already loaded first, then as cuda-pathfinder looks.

    Raises
    ------
    UnavailableError
        There is none, or it is too old; the message says what to install.
    """
    global found
    if found is None:
        found = load()
    return found


cdef object load():
    cdef nvrtc_functions filled
    cdef void *library
    cdef void **place = <void **> &filled
    cdef int major = 0
    cdef int minor = 0
    cdef int count = 0
    cdef int i
    cdef int *architectures
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    try:
        loaded = load_nvidia_dynamic_lib("nvrtc")
    except (DynamicLibNotFoundError, RuntimeError) as error:
        raise UnavailableError(
            "CUDA C++ is compiled by NVRTC, which is not installed: pip install 'kina[nvrtc]', or put the libraries of "
            f"a CUDA toolkit on the loader's path ({str(error).splitlines()[0]})", operation="module",
        ) from None
    library = <void *> <uintptr_t> loaded._handle_uint
    for i, name in enumerate((
        b"nvrtcGetErrorString", b"nvrtcVersion", b"nvrtcGetNumSupportedArchs", b"nvrtcGetSupportedArchs",
        b"nvrtcCreateProgram", b"nvrtcDestroyProgram", b"nvrtcAddNameExpression", b"nvrtcCompileProgram",
        b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog", b"nvrtcGetCUBINSize", b"nvrtcGetCUBIN", b"nvrtcGetPTXSize",
        b"nvrtcGetPTX", b"nvrtcGetLoweredName",
    )):
        place[i] = dlsym(library, <const char *> <bytes> name)
        if place[i] == NULL:
            raise UnavailableError(f"the NVRTC at {loaded.abs_path} is too old, it has no {name.decode()}: "
                                   "pip install 'kina[nvrtc]'", operation="module")
    if filled.version(&major, &minor) != NVRTC_SUCCESS or filled.supported_count(&count) != NVRTC_SUCCESS:
        raise UnavailableError(f"the NVRTC at {loaded.abs_path} does not tell its version", operation="module")
    architectures = <int *> calloc(max(1, count), sizeof(int))
    if architectures == NULL:
        raise MemoryError("no host memory for the architectures of NVRTC")
    filled.supported(architectures)
    supported = tuple(sorted(architectures[i] for i in range(count)))
    free(architectures)
    status = os.stat(loaded.abs_path)
    global functions
    functions = filled
    return NvrtcLibrary(loaded.abs_path, (major, minor), (status.st_size, status.st_mtime_ns), supported)


cdef class Words:
    """Words()

    Strings of Python as C wants them, for as long as it lives."""

    cdef tuple kept
    cdef const char **words

    def __cinit__(self, tuple kept not None):
        cdef int i
        self.kept = kept
        self.words = <const char **> calloc(len(kept) + 1, sizeof(char *))
        if self.words == NULL:
            raise MemoryError("no host memory for the options of a compilation")
        for i in range(len(kept)):
            self.words[i] = <bytes> kept[i]

    def __dealloc__(self):
        free(self.words)


cdef class Program:
    """Program()

    One nvrtcProgram, destroyed with it."""

    cdef nvrtc_program c

    def __dealloc__(self):
        if self.c != NULL:
            functions.destroy(&self.c)

    cdef bytes text(self, int (*size_of)(nvrtc_program, size_t *) noexcept nogil,
                    int (*get)(nvrtc_program, char *) noexcept nogil, str what):
        cdef size_t nbytes = 0
        cdef int code = size_of(self.c, &nbytes)
        cdef bytes text
        if code == NVRTC_SUCCESS and nbytes > 0:
            text = bytes(nbytes)
            code = get(self.c, <char *> text)
        else:
            text = b""
        if code != NVRTC_SUCCESS:
            raise CompileError(f"NVRTC gives no {what}: {words_of(code)}", operation="module")
        return text


cdef str words_of(int code):
    return functions.error_string(code).decode(errors="replace")


def compile_program(
    bytes source not None, bytes name not None, tuple options not None, tuple names not None, bint ptx
) -> tuple[bytes, bytes, str, tuple[str, ...]]:
    """Compile one program, without the GIL.

    Parameters
    ----------
    source, name : bytes
        NUL-free text, and what it is called in messages.
    options, names : tuple of bytes
        Options of NVRTC, one word each; name expressions.
    ptx : bool
        Whether PTX is wanted, or a CUBIN.

    Returns
    -------
    tuple
        The image, its PTX, the compiler's words (warnings), the lowered name of each expression.

    Raises
    ------
    CompileError
        The source, an option or a name was refused; ``log`` has the compiler's words.
    """
    cdef Words given = Words(options)
    cdef Words expressions = Words(names)
    cdef Program program = Program.__new__(Program)
    cdef const char *text = source
    cdef const char *title = name
    cdef const char *lowered = NULL
    cdef int count = <int> len(options)
    cdef int name_count = <int> len(names)
    cdef int code, i
    nvrtc()
    with nogil:
        code = functions.create(&program.c, text, title, 0, NULL, NULL)
        for i in range(name_count):
            if code == NVRTC_SUCCESS:
                code = functions.add_name(program.c, expressions.words[i])
        if code == NVRTC_SUCCESS:
            code = functions.compile(program.c, count, given.words)
    if program.c == NULL:
        raise CompileError(f"NVRTC could not begin: {words_of(code)}", operation="module")
    log = program.text(functions.log_size, functions.log, "log").rstrip(b"\0").decode(errors="replace").strip()
    if code == NVRTC_ERROR_OUT_OF_MEMORY:
        raise MemoryError("no host memory for a compilation")
    if code != NVRTC_SUCCESS:
        refused(code, log, options)
    if ptx:
        image = program.text(functions.ptx_size, functions.ptx, "PTX")
    else:
        image = program.text(functions.cubin_size, functions.cubin, "CUBIN")
    if not image:
        raise CompileError("NVRTC made no code: the options ask for something that cannot be loaded",
                           operation="module")
    text_of_ptx = image if ptx else program.text(functions.ptx_size, functions.ptx, "PTX")
    names_in_image = []
    for i in range(name_count):
        code = functions.lowered(program.c, expressions.words[i], &lowered)
        if code != NVRTC_SUCCESS:
            raise CompileError(f"the name expression {names[i].decode()!r} has no name in the code: {words_of(code)}",
                               operation="module")
        names_in_image.append(lowered.decode())
    return image, text_of_ptx, log, tuple(names_in_image)


cdef int refused(int code, str log, tuple options) except -1:
    first = next((line for line in log.splitlines() if "error" in line), None)
    why = first or (log.splitlines()[0] if log else words_of(code))
    what = "the source"
    if code == NVRTC_ERROR_INVALID_OPTION:
        what = f"one of the options {' '.join(option.decode() for option in options)}"
    error = CompileError(f"NVRTC refused {what}: {why}", operation="module")
    error.log = log
    raise error
