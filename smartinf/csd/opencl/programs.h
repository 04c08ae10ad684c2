// Kernels of a device, built when they are first used and kept on disk.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/opencl/context.h"
#include "smartinf/csd/opencl/job.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::csd::opencl {

/// The kind of update that a kernel is compiled for.
struct UpdateKind {
  kernels::UpdateRule rule = kernels::UpdateRule::kAdamW;
  base::StateFormat format;
  base::DataType gradient = base::DataType::kBf16;
  base::DataType weights = base::DataType::kBf16;

  auto operator<=>(const UpdateKind&) const = default;
};

struct PlaneKernels {
  Kernel decode, encode, cast;
};

/// Threads: one at a time.
class Programs {
 public:
  explicit Programs(const Device& device) : device_(device) {}

  /// Built, or read from the cache, and tested. Errors: kUnsupported with the first lines of the
  /// compiler's log, or with what differs from the scalar truth; Device's.
  base::Result<cl_kernel> update(const UpdateKind& kind);
  base::Result<const PlaneKernels*> planes();
  /// Not tested, and the caller's.
  base::Result<Kernel> fold() const;

  /// The options that the compiler gets for every program. -w: some print their warnings on the
  /// terminal.
  static constexpr std::string_view kOptions =
      "-cl-std=CL1.2 -cl-fp32-correctly-rounded-divide-sqrt -w";

 private:
  /// One block of hard numbers, compared with the scalar truth. Errors: kUnsupported with what
  /// differs.
  base::Status test(const UpdateKind& kind, cl_kernel kernel) const;
  base::Result<Program> build(const std::string& text, const std::string& options) const;
  base::Result<Program> from_source(const std::string& text, const std::string& options) const;

  const Device& device_;
  std::map<UpdateKind, Kernel> updates_;
  std::unique_ptr<PlaneKernels> planes_;
};

}  // namespace smartinf::csd::opencl
