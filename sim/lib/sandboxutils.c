// libnvidia-sandboxutils, the driver's library that reports which files a GPU needs. NVIDIA's container toolkit uses it
// before NVML, and only NVML if it does not initialize, which happens on real nodes too. This one never initializes. It
// is compiled into a library of its own.
enum {
    SANDBOXUTILS_ERROR_UNINITIALIZED = 1,
    SANDBOXUTILS_ERROR_NVML_LIB_CALL = 9,
};

#define SANDBOX_API __attribute__((visibility("default")))

SANDBOX_API int nvSandboxUtilsInit(void *input);
SANDBOX_API int nvSandboxUtilsShutdown(void);
SANDBOX_API int nvSandboxUtilsGetDriverVersion(char *version, unsigned int length);
SANDBOX_API int nvSandboxUtilsGetGpuResource(void *request);
SANDBOX_API int nvSandboxUtilsGetFileContent(char *path, char *content, unsigned int *size);

int nvSandboxUtilsInit(void *input)
{
    (void)input;
    return SANDBOXUTILS_ERROR_NVML_LIB_CALL;
}

int nvSandboxUtilsShutdown(void) { return SANDBOXUTILS_ERROR_UNINITIALIZED; }

int nvSandboxUtilsGetDriverVersion(char *version, unsigned int length)
{
    (void)version;
    (void)length;
    return SANDBOXUTILS_ERROR_UNINITIALIZED;
}

int nvSandboxUtilsGetGpuResource(void *request)
{
    (void)request;
    return SANDBOXUTILS_ERROR_UNINITIALIZED;
}

int nvSandboxUtilsGetFileContent(char *path, char *content, unsigned int *size)
{
    (void)path;
    (void)content;
    (void)size;
    return SANDBOXUTILS_ERROR_UNINITIALIZED;
}
