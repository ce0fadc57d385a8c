// The part of pretend_cuda.py that PyTorch reaches from C++ only. PyTorch looks for a GPU once, when its library is
// loaded, so install() must be called before Python imports torch.

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

using namespace c10;

static constexpr DeviceIndex num_devices = 8;  // more than a test needs; pretend_cuda.py says how many it shows
static thread_local DeviceIndex current = 0;   // as with CUDA, a new thread begins with device 0

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
};

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// A tensor of another device in the memory of x, which lives as long as its owner does.
template <class Owner>
static at::Tensor share(const at::Tensor& x, Owner* owner, Device device, DispatchKey key) {
  auto release = [](void* owner) { delete static_cast<Owner*>(owner); };
  DataPtr data(x.storage().mutable_data(), owner, release, device);
  Storage storage(Storage::use_byte_size_t(), x.storage().nbytes(), std::move(data), nullptr, false);
  auto y = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), x.dtype());
  y.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return y;
}

static at::Tensor to_gpu(const at::Tensor& x, int64_t index) {
  Device device(DeviceType::CUDA, static_cast<DeviceIndex>(index));
  return share(x, new at::Tensor(x), device, DispatchKey::CUDA);
}

static at::Tensor to_cpu(const at::Tensor& x) {
  return share(x, new Storage(x.storage()), Device(DeviceType::CPU), DispatchKey::CPU);
}

// A view of x with the shape of `like`, a view of to_cpu(x).
static at::Tensor view_like(const at::Tensor& x, const at::Tensor& like) {
  auto y = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(x.storage()), x.key_set(), like.dtype());
  y.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return y;
}

using Sizes = at::IntArrayRef;
static void set_storage(const at::Tensor& x, Storage source, int64_t offset, Sizes size, Sizes stride) {
  auto impl = x.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
}

// Gives x the shape that an operation in place gave to `like`, to_cpu(x), and its memory if that is another.
static void adopt(const at::Tensor& x, const at::Tensor& like, bool memory) {
  auto storage = memory ? to_gpu(like, x.device().index()).storage() : x.storage();
  set_storage(x, storage, like.storage_offset(), like.sizes(), like.strides());
}

TORCH_LIBRARY(pretend, library) {
  library.def("to_gpu(Tensor x, int index) -> Tensor", to_gpu);
  library.def("to_cpu(Tensor x) -> Tensor", to_cpu);
  library.def("view_like(Tensor x, Tensor like) -> Tensor", view_like);
  library.def("set_storage(Tensor x, Storage source, int offset, int[] size, int[] stride) -> ()", set_storage);
  library.def("adopt(Tensor x, Tensor like, bool memory) -> ()", adopt);
}

extern "C" void install() {
  if (!impl::hasDeviceGuardImpl(DeviceType::CUDA)) impl::registerDeviceGuard(DeviceType::CUDA, new Guard());
}
extern "C" void set_device(int index) { current = static_cast<DeviceIndex>(index); }
extern "C" int get_device() { return current; }
