/* Simulated libcuda.so.1: the CUDA driver of a test host that has no real GPU.
 *
 * vLLM's extensions and Triton's cuda_utils are linked against the driver, so they can't even be imported without one.
 * Here every call answers CUDA_ERROR_NO_DEVICE: enough for vLLM's parser and engine config, which ask NVML (see
 * libnvidia-ml.c), and a clear refusal for whatever would really compute.
 *
 * The list: what `nm -D --undefined-only` shows of cu* in the shared objects of the vLLM 0.20.1 wheel and of torch's
 * libcaffe2_nvrtc.so, what Triton 3.6's cuda_utils and launcher look up, and what a CUDA runtime asks first.
 *
 * cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 libcuda.c
 */
#define SUCCESS 0
#define NO_DEVICE_ERROR 100
#define NO_DEVICE(name) int name(void) { return NO_DEVICE_ERROR; }

/* CUDA 13.0, the one that the wheel is built for. */
int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == SUCCESS ? "no error" : "no CUDA-capable device is detected (simulated libcuda.so.1)";
    return SUCCESS;
}

int cuGetErrorName(int error, const char **text) {
    *text = error == SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_NO_DEVICE";
    return SUCCESS;
}

NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxGetDevice)
NO_DEVICE(cuCtxGetLimit)
NO_DEVICE(cuCtxSetCurrent)
NO_DEVICE(cuCtxSetLimit)
NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDeviceGetAttribute)
NO_DEVICE(cuDeviceGetCount)
NO_DEVICE(cuDeviceGetName)
NO_DEVICE(cuDeviceGetUuid)
NO_DEVICE(cuDevicePrimaryCtxGetState)
NO_DEVICE(cuDevicePrimaryCtxRelease_v2)
NO_DEVICE(cuDevicePrimaryCtxRetain)
NO_DEVICE(cuDeviceTotalMem_v2)
NO_DEVICE(cuFuncGetAttribute)
NO_DEVICE(cuFuncSetAttribute)
NO_DEVICE(cuFuncSetCacheConfig)
NO_DEVICE(cuGetExportTable)
NO_DEVICE(cuGetProcAddress)
NO_DEVICE(cuGetProcAddress_v2)
NO_DEVICE(cuInit)
NO_DEVICE(cuLaunchCooperativeKernel)
NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLaunchKernelEx)
NO_DEVICE(cuLinkAddData_v2)
NO_DEVICE(cuLinkComplete)
NO_DEVICE(cuLinkCreate_v2)
NO_DEVICE(cuMemAddressFree)
NO_DEVICE(cuMemAddressReserve)
NO_DEVICE(cuMemCreate)
NO_DEVICE(cuMemGetAllocationGranularity)
NO_DEVICE(cuMemMap)
NO_DEVICE(cuMemRelease)
NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap)
NO_DEVICE(cuModuleGetFunction)
NO_DEVICE(cuModuleLoad)
NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleLoadDataEx)
NO_DEVICE(cuModuleUnload)
NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DEVICE(cuOccupancyMaxActiveClusters)
NO_DEVICE(cuPointerGetAttribute)
NO_DEVICE(cuStreamGetCtx)
NO_DEVICE(cuTensorMapEncodeTiled)
