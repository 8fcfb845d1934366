/* What stubs.S and interpose.c must agree on; interpose.c asserts it. */
#ifndef KINA_INTERPOSE_LAYOUT_H
#define KINA_INTERPOSE_LAYOUT_H

#define STUBS 4096
#define STUB_BYTES 16

#define RECORD_BYTES 16
#define RECORD_TARGET 0
#define RECORD_SLOT 8

#define SLOT_COUNT 0
#define SLOT_ARMED 8

#endif
