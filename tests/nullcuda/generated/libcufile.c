int null_library(const char *name, void *stream, int launches);
int cuFileBufDeregister(void) { return null_library("cuFileBufDeregister", 0, 0); }
int cuFileBufRegister(void) { return null_library("cuFileBufRegister", 0, 0); }
int cuFileHandleDeregister(void) { return null_library("cuFileHandleDeregister", 0, 0); }
int cuFileHandleRegister(void) { return null_library("cuFileHandleRegister", 0, 0); }
int cuFileRead(void) { return null_library("cuFileRead", 0, 0); }
int cuFileWrite(void) { return null_library("cuFileWrite", 0, 0); }
