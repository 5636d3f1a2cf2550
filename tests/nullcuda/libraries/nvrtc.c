/* The runtime compiler: there is none. */
int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
