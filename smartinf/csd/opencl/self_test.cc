// Whether a device's bits are those of the scalar truth.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/base/checksum.h"
#include "smartinf/csd/opencl/programs.h"
#include "smartinf/kernels/rules.h"
#include "smartinf/kernels/update.h"

namespace smartinf::csd::opencl {
namespace {

using base::DataType;
using base::PlaneKind;
using base::Status;

// Three tiles and a short one, none of whose parts ends with a vector.
constexpr uint64_t kElements = 3 * base::kCodeGroupElements + 149;
constexpr uint64_t kFirstElement = 5 * base::kBlockElements;
/// Where another group begins, inside a tile.
constexpr uint64_t kSecondGroup = base::kCodeGroupElements + 77;

/// Numbers that processors and compilers differ in: NaN, infinities, denormals, zeros of both
/// signs, ends of ranges, ties of roundings; else of any size.
float hard_number(uint64_t seed, uint64_t i) {
  constexpr std::array<uint32_t, 20> kHard{
      0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu,
      0xff7fffffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u, 0x7f800001u, 0x3f800000u,
      0xbf800000u, 0x3f808000u, 0x3f818000u, 0x387fc000u, 0x33000000u, 0x477ff000u};
  const uint64_t word = base::mix_seed(seed, i);
  // A broken number makes a whole q8 or q4 tile NaN: only the first tile has them.
  const bool broken_allowed = i < base::kCodeGroupElements;
  if (word >> 60 < 5) {
    const uint32_t bits = kHard[(word >> 32) % kHard.size()];
    if (broken_allowed || (bits & 0x7f800000u) != 0x7f800000u) return std::bit_cast<float>(bits);
  }
  const auto exponent = static_cast<uint32_t>(word >> 32) % 40 + 100;
  return std::bit_cast<float>((exponent << 23) | static_cast<uint32_t>(word & 0x807fffffu));
}

std::vector<float> hard_numbers(uint64_t seed, bool positive) {
  std::vector<float> values(kElements);
  for (uint64_t i = 0; i < kElements; ++i) {
    values[i] = hard_number(seed, i);
    if (positive)
      values[i] =
          std::bit_cast<float>(std::bit_cast<uint32_t>(values[i]) & kernels::kMagnitudeMask);
  }
  return values;
}

std::string hex(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "0x";
  for (size_t i = bytes.size(); i-- > 0;) {
    const auto byte = std::to_integer<unsigned>(bytes[i]);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15u];
  }
  return text;
}

}  // namespace

Status Programs::test(const UpdateKind& kind, cl_kernel kernel) const {
  const kernels::KernelTable& truth = *kernels::supported_tables().front();
  const std::span<const PlaneKind> kinds = kernels::rule_planes(kind.rule);

  // The state, one plane behind the other, twice.
  std::vector<uint64_t> plane_at;
  std::vector<std::byte> state;
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    const base::Encoding encoding = base::plane_encoding(kind.format, kinds[plane]);
    const std::vector<float> values = hard_numbers(plane + 1, kinds[plane] == PlaneKind::kVariance);
    plane_at.push_back(state.size());
    state.resize(state.size() + (base::encoded_bytes(encoding, kElements) + 63) / 64 * 64);
    truth.encode_block(encoding, kinds[plane], values.data(), state.data() + plane_at.back(),
                       kElements, kFirstElement, 1, 9);
  }
  std::vector<std::byte> wanted_state = state;
  std::vector<std::byte> gradient(kElements * base::data_type_bytes(kind.gradient));
  truth.cast_from_f32(hard_numbers(7, false).data(), gradient.data(), kind.gradient, kElements);
  std::vector<std::byte> weights(kElements * base::data_type_bytes(kind.weights));
  std::vector<std::byte> wanted_weights = weights;

  const kernels::RuleOptions options{.rule = kind.rule, .nesterov = true, .maximize = true};
  const std::array steps{
      kernels::make_step_scalars(options, {.lr = 0.25, .weight_decay = 0.125}, 3, 0.7, 4),
      kernels::make_step_scalars({.rule = kind.rule, .beta1 = 0.2, .eps = 1e-3}, {.lr = 1e-3}, 3,
                                 1.0, 4)};
  kernels::UpdateBlock block{.count = kElements,
                             .element = kFirstElement,
                             .gradient = gradient.data(),
                             .gradient_type = kind.gradient,
                             .weights_out = wanted_weights.data(),
                             .weights_type = kind.weights};
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    block.planes[plane] = wanted_state.data() + plane_at[plane];
  }
  const std::array runs{kernels::ScalarsSpan{kSecondGroup, &steps[0]},
                        kernels::ScalarsSpan{kElements - kSecondGroup, &steps[1]}};
  truth.update_block(kind.format, block, runs);

  // The same by the kernel, with the checksums of what it reads and writes.
  struct Tables {
    std::array<SpanEntry, 2> spans;
    std::array<kernels::RuleScalars, 2> scalars;
    std::array<SumEntry, kSumsPerBlock> in, out;
  } tables{};
  tables.spans = {SpanEntry{kSecondGroup, 0}, SpanEntry{kElements, 1}};
  tables.scalars = {kernels::rule_scalars(steps[0]), kernels::rule_scalars(steps[1])};
  const auto plane_bytes = [&](const std::vector<std::byte>& bytes, size_t plane) {
    return std::span(bytes).subspan(
        plane_at[plane],
        base::encoded_bytes(base::plane_encoding(kind.format, kinds[plane]), kElements));
  };
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    tables.in[plane] = {plane + 11, base::checksum(plane_bytes(state, plane), plane + 11), 1};
    tables.out[plane] = {plane + 21, 0, 1};
  }
  UpdateArguments arguments{};
  arguments.first_element = kFirstElement;
  arguments.count = kElements;
  arguments.step_seed = kernels::rounding_seed(steps[0].seed, steps[0].step);
  std::copy(plane_at.begin(), plane_at.end(), arguments.plane_at);
  arguments.has_weights = 1;
  arguments.spans_at = offsetof(Tables, spans);
  arguments.scalars_at = offsetof(Tables, scalars);
  arguments.sums_in_at = offsetof(Tables, in);
  arguments.sums_out_at = offsetof(Tables, out);
  std::array<uint64_t, kSumsPerBlock> sums{};
  const auto copy = [&](void* host, uint64_t bytes) {
    return device_.buffer(bytes, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, host);
  };
  SI_ASSIGN_OR_RETURN(const Buffer state_buffer, copy(state.data(), state.size()));
  SI_ASSIGN_OR_RETURN(const Buffer gradient_buffer, copy(gradient.data(), gradient.size()));
  SI_ASSIGN_OR_RETURN(const Buffer weights_buffer, copy(weights.data(), weights.size()));
  SI_ASSIGN_OR_RETURN(const Buffer tables_buffer, copy(&tables, sizeof(tables)));
  SI_ASSIGN_OR_RETURN(const Buffer sums_buffer, copy(sums.data(), sizeof(sums)));
  cl_uint index = 0;
  clSetKernelArg(kernel, index++, sizeof(arguments), &arguments);
  for (const Buffer* buffer : {&state_buffer, &gradient_buffer, &weights_buffer, &tables_buffer,
                               &sums_buffer, &sums_buffer}) {
    const cl_mem object = buffer->get();
    clSetKernelArg(kernel, index++, sizeof(object), &object);
  }
  constexpr size_t local = 1;
  SI_RETURN_IF_ERROR(device_.run("clEnqueueNDRangeKernel", [&] {
    return clEnqueueNDRangeKernel(device_.compute.get(), kernel, 1, nullptr, &local, &local, 0,
                                  nullptr, nullptr);
  }));
  SI_RETURN_IF_ERROR(device_.run("clFinish", [&] { return clFinish(device_.compute.get()); }));
  const auto read = [&](const Buffer& buffer, void* host, uint64_t bytes) {
    return device_.run("clEnqueueReadBuffer", [&] {
      return clEnqueueReadBuffer(device_.out.get(), buffer.get(), CL_TRUE, 0, bytes, host, 0,
                                 nullptr, nullptr);
    });
  };
  SI_RETURN_IF_ERROR(read(state_buffer, state.data(), state.size()));
  SI_RETURN_IF_ERROR(read(weights_buffer, weights.data(), weights.size()));
  SI_RETURN_IF_ERROR(read(sums_buffer, sums.data(), sizeof(sums)));

  const auto differs = [&](const std::string& what) {
    return Status(base::ErrorCode::kUnsupported,
                  "the OpenCL device \"" + device_.info.name + "\" computes other bits than " +
                      "smartinf: " + std::string(kernels::update_rule_name(kind.rule)) + ", " +
                      base::state_format_name(kind.format) + " state, " +
                      std::string(base::data_type_name(kind.gradient)) + " gradients, " +
                      std::string(base::data_type_name(kind.weights)) + " weights: " + what,
                  "Its compiler or its arithmetic does not keep to IEEE 754: use processor = "
                  "\"cpu\", and report this message with the driver's version.");
  };
  const auto compare = [&](const std::string& what, std::span<const std::byte> found,
                           std::span<const std::byte> wanted, size_t width) {
    const auto [at, _] = std::ranges::mismatch(found, wanted);
    if (at == found.end()) return Status();
    const size_t i = static_cast<size_t>(at - found.begin()) / width * width;
    return differs(what + " " + std::to_string(i / width) + " is " + hex(found.subspan(i, width)) +
                   " and not " + hex(wanted.subspan(i, width)));
  };
  if (sums[kPlanesMax] != 0) return differs("the checksums of what it was given");
  for (size_t plane = 0; plane < kinds.size(); ++plane) {
    const base::Encoding encoding = base::plane_encoding(kind.format, kinds[plane]);
    const size_t width = encoding == base::Encoding::kF32    ? 4
                         : encoding == base::Encoding::kBf16 ? 2
                                                             : 1;
    SI_RETURN_IF_ERROR(compare(std::string(base::plane_kind_name(kinds[plane])) + " element",
                               plane_bytes(state, plane), plane_bytes(wanted_state, plane), width));
    if (sums[plane] != base::checksum(plane_bytes(wanted_state, plane), plane + 21)) {
      return differs("the checksum of the " + std::string(base::plane_kind_name(kinds[plane])) +
                     " plane");
    }
  }
  return compare("weight", weights, wanted_weights, base::data_type_bytes(kind.weights));
}

}  // namespace smartinf::csd::opencl
