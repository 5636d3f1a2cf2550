/* cuDNN: handles, descriptors, and a backend whose descriptors give back what they were given. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int cudaRuntimeGetVersion(int *out);
int null_library(const char *name, void *stream, int launches);

struct handle {
  void *stream;
};

size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) {
  int version;
  return cudaRuntimeGetVersion(&version), version;
}
int cudnnGetProperty(int which, int *out) { return *out = which == 0 ? 9 : which == 1 ? 20 : 0, 0; }
const char *cudnnGetErrorString(int error) { return error ? "an error of the null cuDNN" : "none"; }
void cudnnGetLastErrorString(char *out, size_t size) {
  if (size) *out = 0;
}
int cudnnCreate(struct handle **out) { return (*out = calloc(1, sizeof **out)) == NULL; }
int cudnnSetStream(struct handle *handle, void *stream) { return handle->stream = stream, 0; }
int cudnnGetStream(struct handle *handle, void **out) { return *out = handle->stream, 0; }

#define DESCRIPTOR(name)                                                                          \
  int cudnnCreate##name##Descriptor(void **out) { return (*out = calloc(1, 64)) == NULL; }        \
  int cudnnDestroy##name##Descriptor(void *descriptor) { return free(descriptor), 0; }
DESCRIPTOR(Tensor)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations,
                                                      void *a, void *b, void *c, void *d, void *e,
                                                      void *f, void *g, size_t *bytes) {
  return *bytes = 0, 0;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode,
                                                             int operations, void *a, void *b,
                                                             void *c, void *d, void *e,
                                                             size_t *bytes) {
  return *bytes = 0, 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations,
                                                         void *a, void *b, size_t *bytes) {
  return *bytes = 0, 0;
}

#define LAUNCHES(name)                                                                            \
  int name(struct handle *handle) { return null_library(#name, handle->stream, 1); }
LAUNCHES(cudnnBatchNormalizationForwardTrainingEx)
LAUNCHES(cudnnBatchNormalizationBackwardEx)
LAUNCHES(cudnnBatchNormalizationForwardInference)
LAUNCHES(cudnnPoolingForward)

/* The backend: attributes by name. What was not set is one descriptor, or zero. */
enum { MOST_ATTRIBUTES = 64, BOOLEAN = 1, HANDLE = 0, INT64 = 3, DESCRIPTOR_TYPE = 15 };

struct descriptor {
  int count;
  struct {
    int name, type;
    int64_t count;
    void *values;
  } attributes[MOST_ATTRIBUTES];
};

/* Bytes of one element of cudnnBackendAttributeType_t. */
static size_t size_of(int type) {
  switch (type) {
  case HANDLE:
  case INT64:
  case 5: /* double */
  case 6: /* pointer */
  case DESCRIPTOR_TYPE: return 8;
  case 2: return 1;   /* bool, in some releases */
  case 26: return 16; /* fraction */
  default: return 4;  /* enumerations and float */
  }
}

int cudnnBackendCreateDescriptor(int type, struct descriptor **out) {
  return (*out = calloc(1, sizeof **out)) == NULL;
}

int cudnnBackendDestroyDescriptor(struct descriptor *descriptor) {
  for (int i = 0; descriptor && i < descriptor->count; i++)
    free(descriptor->attributes[i].values);
  free(descriptor);
  return 0;
}

int cudnnBackendFinalize(struct descriptor *descriptor) { return 0; }

int cudnnBackendSetAttribute(struct descriptor *descriptor, int name, int type, int64_t count,
                             const void *values) {
  int i = 0;
  while (i < descriptor->count && descriptor->attributes[i].name != name)
    i++;
  if (i == MOST_ATTRIBUTES) return 1;
  if (i == descriptor->count) descriptor->count++;
  else free(descriptor->attributes[i].values);
  descriptor->attributes[i].name = name;
  descriptor->attributes[i].type = type;
  descriptor->attributes[i].count = count;
  descriptor->attributes[i].values = malloc(count * size_of(type) + 1);
  if (values) memcpy(descriptor->attributes[i].values, values, count * size_of(type));
  return 0;
}

int cudnnBackendGetAttribute(struct descriptor *descriptor, int name, int type, int64_t wanted,
                             int64_t *found, void *out) {
  for (int i = 0; i < descriptor->count; i++)
    if (descriptor->attributes[i].name == name) {
      int64_t count = descriptor->attributes[i].count;
      if (found) *found = count;
      if (out)
        memcpy(out, descriptor->attributes[i].values,
               (count < wanted ? count : wanted) * size_of(type));
      return 0;
    }
  int64_t count = type == DESCRIPTOR_TYPE || type == INT64 || (type == BOOLEAN && wanted > 0);
  if (found) *found = count;
  if (out && wanted > 0 && type == INT64) *(int64_t *)out = 0;
  if (out && wanted > 0 && type == BOOLEAN) *(int *)out = 0;
  return 0;
}

int cudnnBackendExecute(struct handle *handle, void *plan, void *variables) {
  return null_library("cudnnBackendExecute", handle->stream, 1);
}
