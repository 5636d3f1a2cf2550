/* Graphs: a stream that captures notes what it is given, and launching gives it again.
 *
 * Kernels compute nothing, so that copies and fills alone are kept, in their order; values.py keeps
 * what it computes in the place of kernels. As on a card, neither the host nor another stream may
 * wait for a stream that captures, nor any thread for its device: then the capture is lost. Streams
 * join no capture here.
 */
#include "null.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct node {
  void *to;
  const void *from; /* 0: a fill */
  int value;
  uint64_t bytes;
  struct record what;
};

struct CUgraph_st {
  int lost;
  unsigned long long id;
  struct node *nodes;
  size_t count, room;
};

static struct CUgraph_st *_Atomic latest[MAX_DEVICES]; /* of the captures that have not ended */
static atomic_ullong ids = 1;

struct CUgraph_st *capture_of(cudaStream_t stream) {
  return (uint64_t)stream < 3 ? 0 : stream->capture;
}

cudaError_t lose_capture(cudaStream_t stream) {
  if (!capture_of(stream)) return cudaSuccess;
  stream->capture->lost = 1;
  return failed(cudaErrorStreamCaptureUnsupported);
}

cudaError_t lose_captures_of(int device) {
  struct CUgraph_st *graph = latest[device];
  if (!graph) return cudaSuccess;
  graph->lost = 1;
  return failed(cudaErrorStreamCaptureUnsupported);
}

void capture_bytes(struct CUgraph_st *graph, void *to, const void *from, int value, uint64_t bytes,
                   struct record what) {
  if (graph->count == graph->room) {
    graph->room = graph->room ? 2 * graph->room : 64;
    graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
  }
  graph->nodes[graph->count++] = (struct node){to, from, value, bytes, what};
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if ((uint64_t)stream < 3 || stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
  stream->capture = calloc(1, sizeof *stream->capture);
  stream->capture->id = ids++;
  latest[stream->device] = stream->capture;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
  struct CUgraph_st *graph = capture_of(stream);
  *out = 0;
  if (!graph) return failed(cudaErrorIllegalState);
  stream->capture = 0;
  latest[stream->device] = 0;
  if (graph->lost) return failed(cudaErrorStreamCaptureInvalidated);
  *out = graph;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  struct CUgraph_st *graph = capture_of(stream);
  *status = !graph ? cudaStreamCaptureStatusNone
            : graph->lost ? cudaStreamCaptureStatusInvalidated
                          : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
#define EDGES const cudaGraphEdgeData **edges,
#else
#define EDGES
#endif

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, EDGES size_t *count) {
  struct CUgraph_st *own = capture_of(stream);
  if (id) *id = own ? own->id : 0;
  if (graph) *graph = own;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                          unsigned long long flags) {
  struct CUgraph_st *copy = malloc(sizeof *copy);
  *copy = *graph;
  copy->nodes = malloc(graph->count * sizeof *copy->nodes + 1);
  memcpy(copy->nodes, graph->nodes, graph->count * sizeof *copy->nodes);
  *out = (cudaGraphExec_t)copy;
  return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(out, graph, flags);
}
#endif

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  struct CUgraph_st *graph = (struct CUgraph_st *)exec;
  if (capture_of(stream)) return lose_capture(stream);
  note((struct record){.kind = graph_launch_kind, .device = stream_device(stream),
                       .stream = stream_number(stream), .address = graph->id});
  for (size_t i = 0; i < graph->count; i++) {
    struct node *node = &graph->nodes[i];
    node->what.stream = stream_number(stream);
    note(node->what);
    if (node->from) memmove(on_host(node->to), on_host(node->from), node->bytes);
    else memset(on_host(node->to), node->value, node->bytes);
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  free(graph->nodes);
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return cudaGraphDestroy((cudaGraph_t)exec);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = 1; /* torch warns of graphs without any */
  return cudaSuccess;
}
