int null_library(const char *name, void *stream, int launches);
int cufftCreate(void) { return null_library("cufftCreate", 0, 0); }
int cufftDestroy(void) { return null_library("cufftDestroy", 0, 0); }
int cufftSetAutoAllocation(void) { return null_library("cufftSetAutoAllocation", 0, 0); }
int cufftSetStream(void) { return null_library("cufftSetStream", 0, 0); }
int cufftSetWorkArea(void) { return null_library("cufftSetWorkArea", 0, 0); }
int cufftXtExec(void) { return null_library("cufftXtExec", 0, 0); }
int cufftXtMakePlanMany(void) { return null_library("cufftXtMakePlanMany", 0, 0); }
