/* A CUDA runtime without a card: what its files share.
 *
 * Device memory is host memory at addresses that the host cannot touch by mistake, copies are done
 * at once, and kernels are noted, not run. Everything is counted by kind and device; while a trace
 * is on, it is also recorded in order, so that races.py can ask what was ordered by what.
 */
#pragma once
#include <cuda_runtime_api.h>
#include <stdint.h>

enum { MAX_DEVICES = 64 };

#define KINDS(X)                                                                                  \
  X(launch) X(library) X(read) X(write)                                                           \
  X(copy_in) X(copy_out) X(copy_within) X(copy_peer) X(copy_host) X(fill)                         \
  X(event_record) X(event_wait) X(event_sync) X(event_query)                                      \
  X(stream_create) X(stream_sync) X(stream_query) X(device_sync)                                  \
  X(device_malloc) X(device_free) X(host_malloc) X(host_free) X(context) X(enable_peer)           \
  X(host_function) X(graph_launch) X(wrong_device) X(not_done) X(hand_over) X(take_over)

enum kind {
#define AS_CONSTANT(name) name##_kind,
  KINDS(AS_CONSTANT)
#undef AS_CONSTANT
  KIND_COUNT
};

enum flag { BLOCKS_HOST = 1, PAGEABLE = 2 };

struct record {
  uint64_t address, source, bytes; /* what is written, what is read; an event's number */
  const char *name;                /* of a kernel, a library's function or an operator */
  uint64_t cpu;                    /* nanoseconds that the thread has computed, less this clock's */
  int32_t thread, kind, device, stream, flags;
};

void note(struct record what);
cudaError_t failed(cudaError_t error); /* remembered for cudaGetLastError */

extern _Thread_local int current_device;
extern int device_count, peers_allowed;
extern uint64_t device_memory[MAX_DEVICES];
void enter_device(int device); /* a context is made where there was none */

int device_of(const void *address); /* -1 for the host's memory */
void *on_host(const void *address); /* where the bytes of an address really lie */
int is_allocated(const void *address, uint64_t bytes);
uint64_t memory_in_use(int device);

struct CUgraph_st; /* what a stream was given while it captured */
struct CUstream_st {
  int device, number, priority;
  struct CUgraph_st *capture;
  int asked;
};
struct CUgraph_st *capture_of(cudaStream_t stream); /* 0 where it does not capture */
cudaError_t lose_capture(cudaStream_t stream);      /* what it was asked for cannot be captured */
cudaError_t lose_captures_of(int device);           /* somebody waits for all of the device */
void capture_bytes(struct CUgraph_st *graph, void *to, const void *from, int value, uint64_t bytes,
                   struct record what); /* noted at every launch */
int stream_device(cudaStream_t stream); /* the default stream is the current device's */
int stream_number(cudaStream_t stream);
