// One job on an OpenCL device: what is enqueued for it, and what the host does when all of that is
// done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/opencl/context.h"
#include "smartinf/csd/opencl/job.h"
#include "smartinf/csd/opencl/memory.h"
#include "smartinf/csd/opencl/programs.h"
#include "smartinf/csd/processor.h"

namespace smartinf::csd::opencl {

/// Used for one job after another. Threads: begin() from who starts jobs; end() from OpenCL's
/// thread that says that last() is done.
class JobRun {
 public:
  /// All outlive it. regions: those of the processor's slots.
  JobRun(const Device& device, Programs& programs,
         const std::vector<std::shared_ptr<Region>>& regions)
      : device_(device), programs_(programs), regions_(regions), buffers_(device) {}

  /// Enqueues everything. Errors: nothing of the job is under way any more.
  base::Status begin(Job& job);
  /// Complete when the job is.
  cl_event last() const { return last_.get(); }
  Job& job() const { return *job_; }
  /// Does what remains for the host once it is: where it was `done`, the checksums and samples. The
  /// job's first failure, or ok.
  base::Status end(bool done);

 private:
  using What = OpenClTraffic::What;

  base::Status enqueue(const UpdateJob& job);
  base::Status enqueue(const DecodeJob& job);
  base::Status enqueue(const EncodeJob& job);
  base::Status enqueue(const CastJob& job);
  base::Status finish(const UpdateJob& job);
  base::Status finish(const DecodeJob& job);
  base::Status finish(const EncodeJob& job);
  base::Status finish(const CastJob& job);

  /// `bytes` at `host`, wherever a kernel finds them.
  base::Result<Place> place(const std::byte* host, uint64_t bytes);
  /// Brings or fetches a part of a place that is copied; of one that is shared, fetching makes it
  /// visible here.
  base::Status bring(What what, const Place& place, const std::byte* host, uint64_t first,
                     uint64_t bytes);
  base::Status fetch(What what, const Place& place, std::byte* host, uint64_t first,
                     uint64_t bytes);
  base::Status launch(cl_kernel kernel, uint64_t groups);
  template <typename... Arguments>
  base::Status set_arguments(cl_kernel kernel, const Arguments&... arguments);
  /// A plane's job: its sums go to sums_[sums_at...].
  base::Status launch_plane(cl_kernel kernel, PlaneArguments arguments, const Place& state,
                            const Place& values, const Place& tables, uint64_t sums_at);
  /// The next entries of the tables; their place in bytes.
  template <typename T>
  uint64_t append(const std::vector<T>& entries);
  void append_update_tables(const UpdateJob& job, UpdateArguments& arguments);
  void append_matrices(const UpdateJob& job, UpdateArguments& arguments);
  /// Brings the tables; call when they are complete.
  base::Result<Place> tables();
  base::Status fetch_sums();

  const Device& device_;
  Programs& programs_;
  const std::vector<std::shared_ptr<Region>>& regions_;
  Buffers buffers_;
  Job* job_ = nullptr;
  std::vector<uint64_t> tables_;
  std::vector<uint64_t> sums_;
  Place sums_place_;
  Event brought_;               // the last copy to the device
  std::vector<Event> kernels_;  // since the last fetch waited for them
  Event last_;
};

}  // namespace smartinf::csd::opencl
