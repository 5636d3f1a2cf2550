/* Streams and events. All work is done when it is asked for, so that nothing ever waits.
 *
 * With null_busy(n) each event answers n queries with "not ready", unless the host has waited for
 * its device since it was recorded; and so does each stream.
 */
#include "null.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct CUevent_st {
  int device, number, stream, is_recorded;
  struct CUgraph_st *capture; /* that of its stream, when it was recorded */
  int asked;
  uint64_t waits; /* for its device, when it was recorded */
  struct timespec at;
};

static atomic_int streams = 1, events = 1;
static _Atomic uint64_t waits[MAX_DEVICES];
static int busy;
void null_busy(int count) { busy = count; }

/* 0, 1 and 2 are the default stream, the legacy one and the thread's own: one stream here. */
static int is_default(cudaStream_t stream) { return (uint64_t)stream < 3; }
int stream_device(cudaStream_t stream) {
  return is_default(stream) ? current_device : stream->device;
}
int stream_number(cudaStream_t stream) { return is_default(stream) ? 0 : stream->number; }

static void note_stream(enum kind kind, cudaStream_t stream) {
  note((struct record){.kind = kind, .device = stream_device(stream),
                       .stream = stream_number(stream), .flags = BLOCKS_HOST});
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  enter_device(current_device);
  *out = malloc(sizeof **out);
  **out = (struct CUstream_st){current_device, streams++, priority, 0, 0};
  note_stream(stream_create_kind, *out);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = is_default(stream) ? 0 : stream->priority;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  note_stream(stream_sync_kind, stream);
  waits[stream_device(stream)]++;
  return lose_capture(stream);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!is_default(stream) && !capture_of(stream) && stream->asked++ < busy) {
    note((struct record){.kind = stream_query_kind, .device = stream->device,
                         .stream = stream->number});
    return failed(cudaErrorNotReady);
  }
  if (!is_default(stream)) stream->asked = 0;
  note_stream(stream_query_kind, stream);
  return lose_capture(stream);
}

cudaError_t cudaDeviceSynchronize(void) {
  note((struct record){.kind = device_sync_kind, .device = current_device, .flags = BLOCKS_HOST});
  waits[current_device]++;
  return lose_captures_of(current_device);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  enter_device(current_device);
  *out = calloc(1, sizeof **out);
  (*out)->device = current_device;
  (*out)->number = events++;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int device = stream_device(stream);
  if (device != event->device) {
    fprintf(stderr, "null CUDA: an event of device %d is recorded on a stream of device %d\n",
            event->device, device);
    return failed(cudaErrorInvalidResourceHandle);
  }
  event->stream = stream_number(stream);
  event->is_recorded = 1;
  event->capture = capture_of(stream);
  event->asked = 0;
  event->waits = waits[device];
  clock_gettime(CLOCK_MONOTONIC, &event->at);
  note((struct record){.kind = event_record_kind, .device = device, .stream = event->stream,
                       .address = event->number});
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  note((struct record){.kind = event_wait_kind, .device = stream_device(stream),
                       .stream = stream_number(stream), .address = event->number});
  if (capture_of(stream) == event->capture) return cudaSuccess;
  lose_capture(stream);
  return failed(cudaErrorStreamCaptureIsolation);
}

static cudaError_t note_event(enum kind kind, cudaEvent_t event) {
  note((struct record){.kind = kind, .device = event->device, .address = event->number,
                       .flags = BLOCKS_HOST});
  return event->capture ? failed(cudaErrorCapturedEvent) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->asked = busy;
  return note_event(event_sync_kind, event);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  int is_new = event->is_recorded && !event->capture && event->waits == waits[event->device];
  if (!is_new || event->asked++ >= busy) return note_event(event_query_kind, event);
  note((struct record){.kind = event_query_kind, .device = event->device,
                       .address = event->number});
  return failed(cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = (float)((to->at.tv_sec - from->at.tv_sec) * 1e3 +
                          (to->at.tv_nsec - from->at.tv_nsec) / 1e6);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
  note_stream(host_function_kind, stream);
  function(argument);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                  void *argument, unsigned flags) {
  note_stream(host_function_kind, stream);
  function(stream, cudaSuccess, argument);
  return cudaSuccess;
}
