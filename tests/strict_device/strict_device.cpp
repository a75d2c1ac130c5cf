// A pretend accelerator: torch's PrivateUse1 device over main memory. Every operation runs the CPU's kernel after it has
// been counted and its arguments have been checked as CUDA checks them. `device.py` says what it is for.
// torch/extension.h would take half as long again to compile.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

using at::Tensor;
using c10::IntArrayRef;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kStrict = c10::DeviceType::PrivateUse1;

c10::Device strict_device() { return {kStrict, 0}; }
bool is_strict(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kStrict; }

// Counts

std::mutex counts_lock;
std::map<std::string, int64_t> counts;
thread_local int depth = 0;  // Of kernels: what these call in turn is not counted.
bool has_float64 = true;

void count(const std::string& name) {
  if (depth) return;
  std::lock_guard<std::mutex> guard(counts_lock);
  counts[name]++;
}

struct InKernel {
  InKernel() { depth++; }
  ~InKernel() { depth--; }
};

// Operations after which a host waits for the device. An index by a mask is one as well.
const std::set<std::string> kSynchronizing{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::bincount", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor", "aten::allclose"};

// Memory

std::atomic<int64_t> allocated{0}, peak{0};

struct Block {
  void* data;
  int64_t bytes;
};

struct StrictAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, strict_device()};
    auto* block = new Block{c10::alloc_cpu(bytes), static_cast<int64_t>(bytes)};
    const int64_t now = allocated += block->bytes;
    for (int64_t before = peak; before < now && !peak.compare_exchange_weak(before, now);) {}
    return {block->data, block, &free_block, strict_device()};
  }
  static void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= block->bytes;
    c10::free_cpu(block->data);
    delete block;
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};
StrictAllocator allocator;
REGISTER_ALLOCATOR(kStrict, &allocator);

// Streams and events do nothing: operations have ended when they return.
struct StrictGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStrict; }
  c10::Device exchangeDevice(c10::Device) const override { return strict_device(); }
  c10::Device getDevice() const override { return strict_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, strict_device()); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return c10::Stream(c10::Stream::DEFAULT, strict_device()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, StrictGuard);

// Generators: the device's own kind, which CPU tensors refuse, over one of the CPU that kernels draw from.
struct StrictGenerator final : c10::GeneratorImpl {
  explicit StrictGenerator(at::Generator draws = at::detail::createCPUGenerator())
      : GeneratorImpl(strict_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), draws(std::move(draws)) {}
  at::Generator draws;
  void set_current_seed(uint64_t seed) override { draws.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { draws.set_offset(offset); }
  uint64_t get_offset() const override { return draws.get_offset(); }
  uint64_t current_seed() const override { return draws.current_seed(); }
  uint64_t seed() override { return draws.seed(); }
  void set_state(const c10::TensorImpl& state) override { draws.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return draws.unsafeGetGeneratorImpl()->get_state(); }
  StrictGenerator* clone_impl() const override { return new StrictGenerator(draws.clone()); }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<StrictGenerator>();
  return generator;
}

at::Generator draws_of(const at::Generator& given) {
  TORCH_CHECK(
      given.device().type() == kStrict, "Expected a 'strict' device type for generator but found '",
      given.device().type(), "'");
  return static_cast<StrictGenerator*>(given.unsafeGetGeneratorImpl())->draws;
}

// Kernels of operations that take no generator, such as dropout, draw from the CPU's own: meanwhile it is the device's.
struct DrawsOnDevice {
  DrawsOnDevice() : cpu(at::detail::getDefaultCPUGenerator()), device(draws_of(default_generator())) {
    before = cpu.get_state();
    cpu.set_state(device.get_state());
  }
  ~DrawsOnDevice() {
    device.set_state(cpu.get_state());
    cpu.set_state(before);
  }
  at::Generator cpu, device;
  Tensor before;
};

struct StrictHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<StrictGenerator>(); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Device getDeviceFromPtr(void*) const override { return strict_device(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    if (storage.nbytes() && bytes) std::memcpy(data.get(), storage.data(), std::min(storage.nbytes(), bytes));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
StrictHooks hooks;

// What every backend writes itself: making, copying, viewing

Tensor on_cpu(const Tensor& tensor) {  // The same memory as a CPU tensor.
  if (!is_strict(tensor)) return tensor;
  c10::InferenceMode no_inference(false);
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [](void*) {},
      tensor.options().device(at::kCPU).requires_grad(false));
}

c10::ScalarType checked(std::optional<at::ScalarType> given) {
  const auto dtype = c10::dtype_or_default(given);
  TORCH_CHECK_TYPE(has_float64 || dtype != at::kDouble, "Cannot convert to float64: the strict device has none now");
  return dtype;
}

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, checked(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, strides, &allocator, keys, checked(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool from = is_strict(source), to = is_strict(target);
  // As in CUDA, the host waits for a copy unless it is told not to.
  const std::string waits = non_blocking ? "" : "SYNC ";
  count(from && to ? "copy on the device" : from ? "SYNC copy to the host" : waits + "copy to the device");
  InKernel kernel;
  at::AutoDispatchBelowADInplaceOrView guard;
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t numbers = tensor.storage_offset(), elements = 1;
  for (auto each : size) elements *= each;
  const size_t needed = (numbers + elements) * tensor.element_size();
  if (tensor.storage().nbytes() < needed) hooks.resizePrivateUse1Bytes(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (!source.sizes().equals(target.sizes())) resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef strides) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  implementation->set_storage_offset(offset);
  if (strides.data() == nullptr || strides.size() != size.size()) {
    implementation->set_sizes_contiguous(size);
  } else {
    implementation->set_sizes_and_strides(size, strides);
  }
  return tensor;
}

// As on CUDA, tensors of other devices among them are copied one by one.
void foreach_copy_(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  bool all = true;
  for (size_t place = 0; place < targets.size(); place++) {
    all = all && is_strict(targets[place]) && is_strict(sources[place]);
  }
  if (all) count("aten::_foreach_copy_");
  for (size_t place = 0; place < targets.size(); place++) {
    if (all) {
      InKernel kernel;
      at::AutoDispatchBelowADInplaceOrView guard;
      on_cpu(targets[place]).copy_(on_cpu(sources[place]));
    } else {
      const_cast<Tensor&>(targets[place]).copy_(sources[place], non_blocking);
    }
  }
}

// All other operations

// As CUDA, these take CPU tensors beside those of the device.
bool takes_both(const std::string& name) {
  static const std::set<std::string> names{
      "aten::_index_put_impl_", "aten::_foreach_copy", "aten::_to_copy", "aten::copy_", "aten::_unsafe_index"};
  return names.count(name) || name == "aten::index" || name.rfind("aten::index_put", 0) == 0;
}

struct Arguments {
  int on_device = 0;
  bool mask = false;
  std::string elsewhere;

  void see(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (is_strict(tensor)) {
      on_device++;
      mask = mask || tensor.scalar_type() == at::kBool;
    } else if (tensor.device().type() == c10::DeviceType::CPU && tensor.dim() > 0) {
      elsewhere += " " + c10::str(tensor.sizes());
    }
  }
};

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto& overload = schema.overload_name();
  const std::string name = overload.empty() ? schema.name() : schema.name() + "." + overload;
  const size_t given = schema.arguments().size(), first = stack->size() - given;
  Arguments arguments;
  bool indexes_by_mask = false;
  for (size_t place = 0; place < given; place++) {
    auto& value = (*stack)[first + place];
    if (value.isTensor()) {
      arguments.see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& each : value.toTensorVector()) arguments.see(each);
    } else if (value.isOptionalTensorList()) {
      Arguments indices;
      for (OptionalTensor each : value.toOptionalTensorList()) {
        if (each) indices.see(*each);
      }
      indexes_by_mask = indices.mask;
      arguments.elsewhere += indices.elsewhere;
    }
    if (schema.arguments()[place].type()->str().find("Generator") != std::string::npos) {
      value = draws_of(value.isNone() ? default_generator() : value.toGenerator());
    }
  }
  TORCH_CHECK(
      arguments.elsewhere.empty() || !arguments.on_device || takes_both(schema.name()),
      "Expected all tensors to be on the same device, but found at least two devices, strict:0 and cpu! ", name,
      " got CPU tensors of shapes", arguments.elsewhere);
  const bool waits = kSynchronizing.count(name) || kSynchronizing.count(schema.name()) || indexes_by_mask;
  count(waits ? "SYNC " + name : name);
  InKernel kernel;
  std::optional<DrawsOnDevice> draws;
  if (operation.hasTag(at::Tag::nondeterministic_seeded)) draws.emplace();
  at::native::cpu_fallback(operation, stack);
}

// Composite operations whose backward passes need the backend's own

Tensor contiguous(const Tensor& tensor) { return tensor.defined() ? on_cpu(tensor).contiguous() : tensor; }
Tensor on_device(const Tensor& tensor) { return tensor.defined() ? tensor.to(strict_device()) : tensor; }
OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor && tensor->defined() ? OptionalTensor(contiguous(*tensor)) : std::nullopt;
}
OptionalTensor on_cpu(const OptionalTensor& tensor) {
  return tensor && tensor->defined() ? OptionalTensor(on_cpu(*tensor)) : std::nullopt;
}

void check_device(const char* name, const Tensor& like, std::initializer_list<OptionalTensor> others) {
  for (const auto& each : others) {
    TORCH_CHECK(
        !each || !each->defined() || each->device() == like.device(),
        "Expected all tensors to be on the same device: ", name);
  }
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  check_device("convolution", input, {weight, bias});
  count("aten::convolution");
  InKernel kernel;
  at::AutoDispatchBelowADInplaceOrView guard;
  return on_device(at::convolution(
      contiguous(input), contiguous(weight), contiguous(bias), stride, padding, dilation, transposed, output_padding,
      groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  check_device("convolution_backward", input, {gradient, weight});
  count("aten::convolution_backward");
  InKernel kernel;
  at::AutoDispatchBelowADInplaceOrView guard;
  const std::vector<int64_t> bias{gradient.size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      contiguous(gradient), contiguous(input), contiguous(weight), c10::OptionalArrayRef<int64_t>(bias), stride,
      padding, dilation, transposed, output_padding, groups, mask);
  return {on_device(of_input), on_device(of_weight), on_device(of_bias)};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& mean,
    const OptionalTensor& variance, bool training, double momentum, double eps) {
  check_device("batch_norm", input, {weight, bias, mean, variance});
  count("aten::native_batch_norm");
  InKernel kernel;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto [output, saved_mean, saved_scale] = at::native_batch_norm(
      contiguous(input), on_cpu(weight), on_cpu(bias), on_cpu(mean), on_cpu(variance), training, momentum, eps);
  return {on_device(output), on_device(saved_mean), on_device(saved_scale)};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  library.impl("native_batch_norm", TORCH_FN(batch_norm));
  library.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
  // Torch would take these apart, tensor by tensor. CUDA has one kernel for all of them.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0 || name.overload_name.find("out") != std::string::npos) continue;
    if (name.name == "aten::_foreach_copy_") continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define LOW(name) KERNEL_PRIVATEUSEONE(name, lower_precision_fp)
#define HIGH(name) KERNEL_PRIVATEUSEONE(name, fp32)
  LOW(conv1d) LOW(conv2d) LOW(conv3d) LOW(addmm) LOW(mm) LOW(mv) LOW(matmul) LOW(linear) LOW(bmm) LOW(baddbmm)
  LOW(addbmm) LOW(addmv) LOW(einsum) LOW(chain_matmul) LOW(scaled_dot_product_attention) LOW(prelu)
  HIGH(mse_loss) HIGH(nll_loss) HIGH(nll_loss2d) HIGH(cross_entropy_loss) HIGH(layer_norm) HIGH(group_norm) HIGH(exp)
  HIGH(log) HIGH(rsqrt) HIGH(softplus)
#undef LOW
#undef HIGH
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("count", [](const std::string& name) { count(name); });
  m.def("counts", [] {
    std::lock_guard<std::mutex> guard(counts_lock);
    return counts;
  });
  m.def("reset_counts", [] {
    std::lock_guard<std::mutex> guard(counts_lock);
    counts.clear();
  });
  m.def("set_float64", [](bool present) { has_float64 = present; });
  m.def("memory_allocated", [] { return allocated.load(); });
  m.def("max_memory_allocated", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = allocated.load(); });
  m.def("manual_seed", [](uint64_t seed) { draws_of(default_generator()).set_current_seed(seed); });
  m.def("get_state", [] { return draws_of(default_generator()).get_state(); });
  m.def("set_state", [](const Tensor& state) { draws_of(default_generator()).set_state(state); });
}
