int null_library(const char *name, void *stream, int launches);
