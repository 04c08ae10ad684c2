// The OpenCL processor: what devices it finds and refuses, the programs that it keeps, what it
// copies, and that a device that fails in a step costs that step and nothing else. That its bits
// are the cores' own is the contract's (tests/device_contract), whose kinds of it begin with
// "opencl".
#include "smartinf/csd/opencl_processor.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/test_device.h"
#include "smartinf/csd/test_opencl.h"

namespace smartinf::csd {
namespace {

using base::DataType;
using base::ErrorCode;
using base::Status;

// Values from CL/cl.h, which only csd/opencl includes.
constexpr int kDeviceNotAvailable = -2;
constexpr int kAllocationFailure = -4;
constexpr int kOutOfResources = -5;
constexpr int kBuildProgramFailure = -11;

TEST(ProcessorChoice, IsReadFromItsName) {
  EXPECT_FALSE(parse_processor("cpu")->opencl);
  EXPECT_TRUE(parse_processor("opencl")->opencl);
  EXPECT_EQ(parse_processor("opencl")->device, "");
  EXPECT_EQ(parse_processor("opencl:Portable: x")->device, "Portable: x");
  for (const char* wrong : {"", "gpu", "opencl:", "openclx", "CPU"}) {
    EXPECT_EQ(parse_processor(wrong).status().code(), ErrorCode::kInvalidArgument) << wrong;
  }
}

class OpenClTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_opencl(); !why.empty()) GTEST_SKIP() << why;
    name_ = opencl_devices()->front().name;
    options_.traffic = std::make_shared<OpenClTraffic>();
    options_.fault = [this](std::string_view call) {
      if (call == "clCreateProgramWithSource") ++compiled_;
      return call == failing_ && countdown_-- <= 0 ? error_ : 0;
    };
  }

  base::Result<std::unique_ptr<Processor>> make() const {
    return opencl_processor(options_)([](Job&) {});
  }
  /// From the nth call of that name on.
  void fail(std::string call, int error, int after = 0) {
    error_ = error;
    countdown_ = after;
    failing_ = std::move(call);
  }

  /// last: elements of the last subgroup; 0: the layout's own.
  void make_device(base::StateFormat format = base::StateFormat::kF32, uint64_t last = 0,
                   uint32_t subgroups = 6) {
    layout_ = test_layout(format, 0, subgroups);
    if (last != 0) layout_.subgroups.back().count = last;
    groups_ = test_groups(layout_.subgroups.back().first_element + 2 * base::kBlockElements);
    device_options_.path = device_options_.name = "card-a";
    device_options_.slots = 3;
    device_options_.groups = groups_;
    device_options_.make_processor = opencl_processor(options_);
    const auto size = EmulatedDrive::size_for(layout_, storage::Durability::kStep, 0);
    ASSERT_TRUE(size.ok());
    auto drive = EmulatedDrive::create(*size);
    ASSERT_TRUE(drive.ok());
    drive_ = std::move(*drive);
    auto made = create_emulated_device(device_options_, layout_, *drive_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    device_ = std::move(*made);
    driver_.drive(*device_);
    const Status status = driver_.make_start(layout_);
    ASSERT_TRUE(status.ok()) << status.to_string();
    reference_ = std::make_unique<ReferenceModel>(layout_, groups_);
  }
  /// The same state, which another processor left at that step.
  void open_with_cores(uint64_t step) {
    device_.reset();
    device_options_.make_processor = nullptr;
    auto opened = open_emulated_device(device_options_, *drive_);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    device_ = std::move(*opened);
    driver_.drive(*device_);
    ASSERT_TRUE(device_->recover_to(step).ok());
  }
  void make_step(uint64_t step) {
    ASSERT_TRUE(driver_.run(BeginStep{step}).ok());
    ASSERT_TRUE(driver_.put_all(layout_, step).ok());
    const Status status = driver_.update(layout_, step);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_TRUE(driver_.finish_step(step).ok());
    reference_->step(step, DataType::kBf16, DataType::kBf16);
  }
  void expect_state() {
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      for (size_t plane = 0; plane < layout_.planes.size(); ++plane) {
        std::vector<float> values(layout_.subgroups[i].count);
        ReadState read;
        read.subgroup = layout_.subgroups[i].id;
        read.count = values.size();
        read.planes[plane] = values.data();
        const Status status = driver_.run(read);
        ASSERT_TRUE(status.ok()) << status.to_string();
        EXPECT_TRUE(values == reference_->plane(i, plane)) << "subgroup " << i;
      }
    }
  }
  /// Step 2 has failed: devices and cause are named, step 1 stands, and step 2 can be made again.
  void expect_nothing_lost(const Status& status, ErrorCode code, const std::string& cause) {
    EXPECT_EQ(status.code(), code) << status.to_string();
    for (const std::string& named : {std::string("card-a"), name_, cause}) {
      EXPECT_NE(status.to_string().find(named), std::string::npos) << status.to_string();
    }
    failing_.clear();
    ASSERT_TRUE(driver_.run(Abort{2}).ok());
    EXPECT_EQ(device_->state().committed_step, 1u);
    expect_state();
    make_step(2);
    ASSERT_FALSE(HasFatalFailure());
    expect_state();
  }

  std::string name_;
  OpenClOptions options_;
  std::atomic<int> compiled_ = 0;
  std::string failing_;
  std::atomic<int> countdown_ = 0;
  int error_ = 0;
  storage::StoreLayout layout_;
  std::vector<plan::GroupSpan> groups_;
  LocalDeviceOptions device_options_;
  DeviceDriver driver_;
  std::unique_ptr<ReferenceModel> reference_;
  std::unique_ptr<EmulatedDrive> drive_;
  std::unique_ptr<Device> device_;
};

TEST_F(OpenClTest, ComputesTheBitsOfEveryRule) {
  const Status status = opencl_self_test(options_);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_F(OpenClTest, FindsADeviceByNumberAndByPartOfItsName) {
  options_.device = "0";
  EXPECT_TRUE(make().ok());
  options_.device = name_.substr(2, 6);
  EXPECT_TRUE(make().ok());
  options_.device = "no such card";
  const Status status = make().status();
  EXPECT_EQ(status.code(), ErrorCode::kNotFound);
  EXPECT_NE(status.to_string().find("no such card"), std::string::npos) << status.to_string();
  EXPECT_NE(status.to_string().find(name_), std::string::npos) << "those that there are";
}

TEST_F(OpenClTest, SaysThatThereIsNoPlatform) {
  fail("clGetPlatformIDs", kDeviceNotAvailable);
  const Status status = make().status();
  EXPECT_EQ(status.code(), ErrorCode::kNotFound);
  EXPECT_NE(status.to_string().find("pocl-opencl-icd"), std::string::npos) << status.to_string();
}

TEST_F(OpenClTest, ADeviceWithOtherBitsIsRefusedWithWhatDiffers) {
  options_.compiler_options = " -cl-fast-relaxed-math";
  const Status status = make().status();
  ASSERT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
  EXPECT_NE(status.what().find("computes other bits"), std::string::npos) << status.to_string();
  EXPECT_NE(status.what().find("adamw, q8 state"), std::string::npos) << status.to_string();
}

TEST_F(OpenClTest, AProgramThatDoesNotCompileIsShownWithTheCompilersLog) {
  options_.compiler_options = " -Dkernel=colonel";
  const Status status = make().status();
  ASSERT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
  EXPECT_NE(status.what().find("does not compile"), std::string::npos) << status.to_string();
  EXPECT_NE(status.what().find("error:"), std::string::npos) << status.to_string();
}

TEST_F(OpenClTest, ProgramsAreKeptAndDamagedOnesBuiltAgain) {
  const base::Scratch scratch;
  options_.cache_folder = scratch / "programs";
  ASSERT_TRUE(make().ok());
  EXPECT_EQ(compiled_, 2);
  ASSERT_TRUE(make().ok());
  EXPECT_EQ(compiled_, 2) << "kept";
  size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(options_.cache_folder)) {
    std::fstream content(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    content.seekp(1000 + static_cast<int>(files));
    content.put('\x5a');
    content.put('\xa5');
    ++files;
  }
  EXPECT_EQ(files, 2u) << "and nothing else is left";
  ASSERT_TRUE(make().ok());
  EXPECT_EQ(compiled_, 4);
  ASSERT_TRUE(make().ok());
  EXPECT_EQ(compiled_, 4);
}

TEST_F(OpenClTest, WithoutDeviceMemoryNothingIsOpened) {
  options_.memory = OpenClMemory::kCopied;
  auto made = make();
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  fail("clCreateBuffer", kAllocationFailure);
  const Status status = (*made)->allocate(1 << 20).status();
  EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory) << status.to_string();
  EXPECT_NE(status.to_string().find("CL_MEM_OBJECT_ALLOCATION_FAILURE"), std::string::npos)
      << status.to_string();
  EXPECT_NE(status.to_string().find(name_), std::string::npos) << status.to_string();
}

/// Which call fails, and what of.
struct Failure {
  std::string call;
  int error;
  ErrorCode code;
  OpenClMemory memory;
};
class OpenClFailures : public OpenClTest, public testing::WithParamInterface<Failure> {};

TEST_P(OpenClFailures, InAStepAreNamedAndTheStepCanBeRepeated) {
  const Failure& failure = GetParam();
  options_.memory = failure.memory;
  make_device();
  ASSERT_FALSE(HasFatalFailure());
  make_step(1);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(driver_.run(BeginStep{2}).ok());
  ASSERT_TRUE(driver_.put_all(layout_, 2).ok());
  fail(failure.call, failure.error, 2);
  const Status status = driver_.update(layout_, 2);
  expect_nothing_lost(status, failure.code, failure.call);
}

/// Programs for other types are built when they are first asked for, which may be in a step.
TEST_F(OpenClTest, AProgramThatCannotBeBuiltInAStepLosesNothing) {
  const base::Scratch scratch;
  options_.cache_folder = scratch / "programs";
  make_device();
  ASSERT_FALSE(HasFatalFailure());
  make_step(1);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(driver_.run(BeginStep{2}).ok());
  ASSERT_TRUE(driver_.put_all(layout_, 2).ok());
  fail("clBuildProgram", kBuildProgramFailure);
  Update update;
  update.weights_type = DataType::kF32;
  update.scalars = test_scalars(2);
  update.updates.push_back({layout_.subgroups[0].id, nullptr});
  const Status status = driver_.run(update);
  expect_nothing_lost(status, ErrorCode::kUnsupported, "CL_BUILD_PROGRAM_FAILURE");
}

TEST_F(OpenClTest, TheCoresGoOnFromWhereAVanishedDeviceEnded) {
  make_device();
  ASSERT_FALSE(HasFatalFailure());
  make_step(1);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(driver_.run(BeginStep{2}).ok());
  ASSERT_TRUE(driver_.put_all(layout_, 2).ok());
  fail("clEnqueueNDRangeKernel", kDeviceNotAvailable, 1);
  EXPECT_FALSE(driver_.update(layout_, 2).ok());
  open_with_cores(1);
  ASSERT_FALSE(HasFatalFailure());
  expect_state();
  make_step(2);
  ASSERT_FALSE(HasFatalFailure());
  expect_state();
}

INSTANTIATE_TEST_SUITE_P(OpenCl, OpenClFailures,
                         testing::Values(Failure{"clEnqueueNDRangeKernel", kDeviceNotAvailable,
                                                 ErrorCode::kIo, OpenClMemory::kShared},
                                         Failure{"a kernel or a copy", kDeviceNotAvailable,
                                                 ErrorCode::kIo, OpenClMemory::kCopied},
                                         Failure{"clEnqueueReadBuffer", kOutOfResources,
                                                 ErrorCode::kOutOfMemory, OpenClMemory::kCopied},
                                         Failure{"clCreateBuffer", kAllocationFailure,
                                                 ErrorCode::kOutOfMemory, OpenClMemory::kShared}),
                         [](const auto& param) {
                           std::string name = param.param.call;
                           std::erase(name, ' ');
                           return name;
                         });

/// Blocks so short that the host makes their checksums among them, and such as end within a tile.
TEST_F(OpenClTest, ADeviceThatEndsNoJobIsGivenUp) {
  options_.silence_max = std::chrono::milliseconds(200);
  std::atomic<bool> hangs = false;
  std::atomic<int> held = 0;
  options_.fault = [&](std::string_view call) {
    if (call != "a kernel or a copy" || !hangs) return 0;
    // A driver may call back at once, in the device's own thread, which is not the driver's to hold.
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    if (std::string_view(name.data()) == "si-device") return 0;
    ++held;
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --held;
    return 0;
  };
  make_device(base::StateFormat::kF32, 2 * base::kBlockElements);  // which takes its time
  make_step(1);
  ASSERT_FALSE(HasFatalFailure());
  hangs = true;
  ASSERT_TRUE(driver_.run(BeginStep{2}).ok());
  ASSERT_TRUE(driver_.put_all(layout_, 2).ok());
  const Status status = driver_.update(layout_, 2);
  EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
  EXPECT_NE(status.to_string().find(name_), std::string::npos) << status.to_string();
  ASSERT_TRUE(driver_.run(Abort{2}).ok());
  open_with_cores(1);  // closing does not wait for the jobs either
  ASSERT_FALSE(HasFatalFailure());
  expect_state();
  EXPECT_GT(held, 0) << "and they came back to what is left of them";
  hangs = false;
  while (held > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST_F(OpenClTest, BlocksOfEveryLengthHaveTheBitsOfTheCores) {
  for (const base::StateFormat format :
       {base::StateFormat::kF32,
        base::StateFormat{base::MomentFormat::kBf16, base::MasterFormat::kBf16},
        base::StateFormat::kQ8,
        base::StateFormat{base::MomentFormat::kQ4, base::MasterFormat::kM24}}) {
    for (const uint64_t elements : {1, 7, 60, 61, 120, 121, 235, 236, 255, 256, 257, 511, 65537}) {
      make_device(format, elements, 1);
      ASSERT_FALSE(HasFatalFailure());
      for (uint64_t step = 1; step <= 2; ++step) make_step(step);
      ASSERT_FALSE(HasFatalFailure());
      expect_state();
      open_with_cores(2);  // by whose checksums too
      ASSERT_FALSE(HasFatalFailure());
      expect_state();
      device_.reset();
    }
  }
}

/// The table in docs/opencl.md: with f32 state, bf16 gradients and bf16 weights.
TEST_F(OpenClTest, CountsWhatGoesBetweenTheMemories) {
  constexpr uint64_t kWholeBlocks = 2 * base::kBlockElements;
  for (const OpenClMemory memory :
       {OpenClMemory::kShared, OpenClMemory::kCopied, OpenClMemory::kPeer}) {
    SCOPED_TRACE(base::enum_name(memory));
    options_.memory = memory;
    options_.pretend_peer = true;
    make_device(base::StateFormat::kF32, kWholeBlocks);
    ASSERT_FALSE(HasFatalFailure());
    const uint64_t elements = layout_.subgroups.size() * kWholeBlocks;
    ASSERT_TRUE(driver_.run(BeginStep{1}).ok());
    ASSERT_TRUE(driver_.put_all(layout_, 1).ok());
    for (size_t what = 0; what < OpenClTraffic::kWhats; ++what) {
      options_.traffic->down[what] = options_.traffic->up[what] = 0;
    }
    const base::TrafficReading before = device_->store_traffic();
    std::vector<base::Bf16> weights(elements);
    Update update;
    update.scalars = test_scalars(1);
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      update.updates.push_back({layout_.subgroups[i].id, weights.data() + i * kWholeBlocks});
    }
    const Status status = driver_.run(update);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const auto drive = device_->store_traffic().since(before);
    EXPECT_EQ(drive.up(base::TrafficKind::kState), 12 * elements);
    EXPECT_EQ(drive.down(base::TrafficKind::kState), 12 * elements);
    ASSERT_TRUE(driver_.finish_step(1).ok());
    reference_->step(1, DataType::kBf16, DataType::kBf16);

    const OpenClTraffic& traffic = *options_.traffic;
    const bool copied = memory == OpenClMemory::kCopied;
    for (const auto what :
         {OpenClTraffic::kMaster, OpenClTraffic::kMomentum, OpenClTraffic::kVariance}) {
      EXPECT_EQ(traffic.down[what], copied ? 4 * elements : 0);
      EXPECT_EQ(traffic.up[what], copied ? 4 * elements : 0);
    }
    const uint64_t of_weights = memory == OpenClMemory::kShared ? 0 : 2 * elements;
    EXPECT_EQ(traffic.down[OpenClTraffic::kGradient], of_weights);
    EXPECT_EQ(traffic.up[OpenClTraffic::kWeights], of_weights);
    const uint64_t to_drive = memory == OpenClMemory::kPeer ? 0 : 24 * elements;
    EXPECT_EQ(to_drive + traffic.state_bytes() + 2 * of_weights,
              elements * (copied                          ? 52
                          : memory == OpenClMemory::kPeer ? 4
                                                          : 24));
    expect_state();
    device_.reset();
  }
}

}  // namespace
}  // namespace smartinf::csd
