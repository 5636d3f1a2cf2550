/* NCCL: nothing is moved. */
int ncclGetVersion(int *out) { return *out = 22907, 0; }
const char *ncclGetErrorString(int error) { return "the null NCCL"; }
