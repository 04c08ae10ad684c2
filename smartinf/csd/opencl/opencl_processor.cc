#include "smartinf/csd/opencl_processor.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "smartinf/csd/opencl/context.h"
#include "smartinf/csd/opencl/job_run.h"
#include "smartinf/csd/opencl/memory.h"
#include "smartinf/csd/opencl/programs.h"

namespace smartinf::csd {
namespace opencl {
namespace {

using base::Status;

/// The slots' half of a region.
class RegionMemory final : public SlotMemory {
 public:
  explicit RegionMemory(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  std::span<std::byte> bytes() const override { return region_->bytes(); }

 private:
  std::shared_ptr<Region> region_;
};

class OpenClProcessor final : public Processor {
 public:
  OpenClProcessor(std::shared_ptr<Device> device, std::function<void(Job&)> on_finished)
      : device_(std::move(device)), programs_(*device_), on_finished_(std::move(on_finished)) {}
  ~OpenClProcessor() override {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return in_flight_ == 0; });
  }

  /// One program of those that there will be, so that a device whose bits differ is refused at
  /// once.
  Status test() {
    SI_RETURN_IF_ERROR(programs_.update({.format = base::StateFormat::kQ8}).status());
    return programs_.planes().status();
  }

  base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) override {
    SI_ASSIGN_OR_RETURN(std::shared_ptr<Region> region, Region::allocate(device_, bytes));
    // shared_ptr: jobs look for the device's half of what the slots' owner has.
    regions_.push_back(region);
    return std::unique_ptr<SlotMemory>(std::make_unique<RegionMemory>(std::move(region)));
  }

  void start(Job& job) override {
    job.status = Status();
    Running* running = nullptr;
    {
      const std::lock_guard lock(mutex_);
      ++in_flight_;
      if (free_.empty()) {
        all_.push_back(std::make_unique<Running>(*this));
        free_.push_back(all_.back().get());
      }
      running = free_.back();
      free_.pop_back();
    }
    if (Status begun = running->run.begin(job); !begun.ok())
      return finish(*running, std::move(begun));
    const Status watched = device_->run("clSetEventCallback", [&] {
      return clSetEventCallback(running->run.last(), CL_COMPLETE, on_complete, running);
    });
    if (watched.ok()) return;
    const cl_event last = running->run.last();
    clWaitForEvents(1, &last);
    finish(*running, watched);
  }

  uint32_t threads() const override { return device_->info.cpu ? device_->compute_units : 0; }

 private:
  /// One for every job at once; kept for the next.
  struct Running {
    explicit Running(OpenClProcessor& owner_)
        : owner(owner_), run(*owner_.device_, owner_.programs_, owner_.regions_) {}
    OpenClProcessor& owner;
    JobRun run;
  };

  static void CL_CALLBACK on_complete(cl_event, cl_int status, void* running) {
    auto& done = *static_cast<Running*>(running);
    done.owner.finish(done, done.owner.device_->run("a kernel or a copy", [&] {
      return std::min<cl_int>(status, CL_SUCCESS);
    }));
  }

  void finish(Running& running, Status status) {
    Job& job = running.run.job();
    Status ended = running.run.end(status.ok());
    job.status = status.ok() ? std::move(ended) : std::move(status);
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(&running);
    }
    on_finished_(job);
    const std::lock_guard lock(mutex_);
    --in_flight_;
    idle_.notify_all();
  }

  std::shared_ptr<Device> device_;
  Programs programs_;
  std::vector<std::shared_ptr<Region>> regions_;
  std::function<void(Job&)> on_finished_;
  std::mutex mutex_;
  std::condition_variable idle_;
  uint32_t in_flight_ = 0;
  std::vector<std::unique_ptr<Running>> all_;  // as many as there were jobs at once
  std::vector<Running*> free_;                 // of them
};

}  // namespace
}  // namespace opencl

ProcessorFactory opencl_processor(OpenClOptions options) {
  return [options = std::move(options)](
             std::function<void(Job&)> on_finished) -> base::Result<std::unique_ptr<Processor>> {
    SI_ASSIGN_OR_RETURN(std::shared_ptr<opencl::Device> device, opencl::open_device(options));
    auto made =
        std::make_unique<opencl::OpenClProcessor>(std::move(device), std::move(on_finished));
    SI_RETURN_IF_ERROR(made->test());
    return std::unique_ptr<Processor>(std::move(made));
  };
}

base::Status opencl_self_test(const OpenClOptions& options) {
  SI_ASSIGN_OR_RETURN(const std::unique_ptr<opencl::Device> device, opencl::open_device(options));
  opencl::Programs programs(*device);
  uint32_t i = 0;
  for (const kernels::UpdateRule rule : kernels::all_update_rules()) {
    const auto nth = [](uint32_t n) { return static_cast<uint8_t>(n % 3); };
    const opencl::UpdateKind kind{.rule = rule,
                                  .format = static_cast<base::StateFormat>(nth(i)),
                                  .gradient = static_cast<base::DataType>(nth(i + 1)),
                                  .weights = static_cast<base::DataType>(nth(i + 2))};
    SI_RETURN_IF_ERROR(programs.update(kind).status());
    ++i;
  }
  return programs.planes().status();
}

}  // namespace smartinf::csd
