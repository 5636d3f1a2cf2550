/* What happened: counts by kind and device, and records while a trace is on. */
#define _GNU_SOURCE
#include "null.h"
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RECORDS = 1 << 23 };

static const char *names[] = {
#define AS_TEXT(name) #name,
    KINDS(AS_TEXT)
#undef AS_TEXT
};
static _Atomic uint64_t counts[KIND_COUNT][MAX_DEVICES], bytes[KIND_COUNT][MAX_DEVICES];
static struct record *records;
static _Atomic uint64_t recorded;
static atomic_int tracing;
static uint64_t clock_costs; /* nanoseconds in which a thread reads its clock */

static uint64_t computed(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

/* The least mean of some batches: what else runs on the machine makes others longer. */
static void time_the_clock(void) {
  enum { READS = 500, BATCHES = 10 };
  for (int batch = 0; batch < BATCHES; batch++) {
    uint64_t start = computed();
    for (int read = 1; read < READS; read++) computed();
    uint64_t costs = (computed() - start) / READS;
    if (!clock_costs || costs < clock_costs) clock_costs = costs;
  }
}

void note(struct record what) {
  static _Thread_local int thread;
  static _Thread_local uint64_t reads;
  if (what.device >= 0 && what.device < MAX_DEVICES) {
    counts[what.kind][what.device]++;
    bytes[what.kind][what.device] += what.bytes;
  }
  if (!tracing) return;
  if (!thread) thread = (int)syscall(SYS_gettid);
  what.thread = thread;
  what.cpu = computed() - clock_costs * reads++;
  uint64_t place = recorded++;
  if (place < MOST_RECORDS) records[place] = what;
}

/* From here on for Python (card.py). */

const char *null_kind(int kind) { return kind < KIND_COUNT ? names[kind] : 0; }
uint64_t null_count(int kind, int device) { return counts[kind][device]; }
uint64_t null_bytes(int kind, int device) { return bytes[kind][device]; }

void null_reset(void) {
  memset(counts, 0, sizeof counts);
  memset(bytes, 0, sizeof bytes);
}

void null_trace(int on) {
  if (on && !clock_costs) time_the_clock();
  if (on && !records)
    records = mmap(0, sizeof(struct record) * (size_t)MOST_RECORDS, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (on) recorded = 0;
  tracing = on;
}

int null_tracing(void) { return tracing; }

/* The records of the trace; how many there are is written to `count`, more than fit included. */
const struct record *null_records(uint64_t *count, uint64_t *most) {
  *count = recorded;
  *most = MOST_RECORDS;
  return records;
}

/* One thread of the host has told another to go on: what it knew, the other one knows. */
void null_hand_over(uint64_t key, int takes) {
  note((struct record){.kind = takes ? take_over_kind : hand_over_kind, .device = -1,
                       .address = key});
}

/* What an operator reads or writes, told by values.py: kernels themselves do not say. */
void null_access(const char *name, int device, cudaStream_t stream, uint64_t address,
                 uint64_t size, int writes) {
  note((struct record){.kind = writes ? write_kind : read_kind, .device = device, .name = name,
                       .stream = stream_number(stream), .address = address, .bytes = size});
}
