// What torch's CPU build lacks to take a CUDA device for present; `fake_cuda.py` computes in its place.
//
// Sources: `NoOpDeviceGuardImpl`, by which torch itself traces CUDA code on machines without a GPU (its own way in,
// `torch._C._ensureCUDADeviceGuardSet`, is for builds with CUDA only), and `at::CUDAHooksInterface`.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kCUDA> {
  c10::Device getDevice() const override { return {kCUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kCUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kCUDA, 0));
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(c10::Device(kCUDA, 0)); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Host memory that knows that it is pinned.
struct Pinned final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> held;

  static Pinned& one() {
    static auto* pinned = new Pinned();
    return *pinned;
  }

  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(one().mutex);
      one().held.erase(static_cast<const char*>(data));
    }
    std::free(data);
  }

  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    if (posix_memalign(&data, 64, size == 0 ? 1 : size) != 0) {
      throw std::bad_alloc();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    held[static_cast<const char*>(data)] = size == 0 ? 1 : size;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }

  bool has(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = held.upper_bound(static_cast<const char*>(data));
    if (after == held.begin()) {
      return false;
    }
    --after;
    return static_cast<const char*>(data) < after->first + after->second;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Asked for by torch's CUDA build, as it chooses a kernel of attention.
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::one(); }
  bool isPinnedPtr(const void* data) const override { return Pinned::one().has(data); }
};

// torch has made its own by now, which answer that there is nothing; they hold no data.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
const auto* placed = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();

}  // namespace
