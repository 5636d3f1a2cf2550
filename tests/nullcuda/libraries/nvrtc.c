/* The runtime compiler: there is none. */
int cudaRuntimeGetVersion(int *out);

int nvrtcVersion(int *major, int *minor) {
  int version;
  cudaRuntimeGetVersion(&version);
  return *major = version / 1000, *minor = version % 1000 / 10, 0;
}
