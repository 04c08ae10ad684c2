// The OpenCL processor's bits beside those of the cores: every rule, state format, type of
// gradients and of weights, in every memory, over lengths that end everywhere in a block, and
// numbers in which processors differ. A few of these programs in every run, all with
// SMARTINF_TEST_PROGRAMS=1.
#include <array>
#include <bit>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "smartinf/base/checksum.h"
#include "smartinf/compress/message.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/opencl_processor.h"
#include "smartinf/csd/test_device.h"
#include "smartinf/csd/test_opencl.h"

namespace smartinf::csd {
namespace {

using base::DataType;
using base::StateFormat;
using base::Status;

/// Some below 240 bytes in every format, and such as end before, at and behind a tile and a block.
constexpr std::array<uint64_t, 10> kCounts{1,   59,  61,  240,    255,
                                           256, 257, 513, 65'536, 2 * 65'536 + 4321};

struct Program {
  kernels::UpdateRule rule;
  StateFormat format;
  DataType gradient;
  DataType weights;

  std::string name() const {
    return fmt::format("{}_{}_{}_{}_{}", kernels::update_rule_name(rule),
                       base::enum_name(format.master), base::enum_name(format.moments),
                       base::data_type_name(gradient), base::data_type_name(weights));
  }
};

/// The sample has those that opencl_self_test() compiles.
std::vector<Program> programs() {
  const bool all = std::getenv("SMARTINF_TEST_PROGRAMS") != nullptr;
  std::vector<Program> chosen;
  uint32_t number = 0;
  for (const kernels::UpdateRule rule : kernels::all_update_rules()) {
    const std::span<const StateFormat> formats = base::all_state_formats();
    for (uint32_t i = 0; i < 9 * formats.size(); ++i) {
      const uint32_t format = i / 9;
      const uint32_t gradient = i / 3 % 3;
      const uint32_t weights = i % 3;
      const bool sample = format == 5 * number % formats.size() && gradient == (number + 1) % 3 &&
                          weights == (number + 2) % 3;
      if (!all && !sample) continue;
      chosen.push_back(
          {rule, formats[format], static_cast<DataType>(gradient), static_cast<DataType>(weights)});
    }
    ++number;
  }
  return chosen;
}

/// Values of any size, with NaN, infinities, denormals, both zeros, ties and ends of ranges among
/// them; what is no number, or huge, only in every sixteenth tile, because in q8 it spoils its
/// tile.
std::vector<float> hard_floats(uint64_t count, uint64_t seed, bool positive) {
  constexpr std::array<uint32_t, 16> kHard{0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u,
                                           0x007fffffu, 0x00800000u, 0x3f808000u, 0x3f818000u,
                                           0x387fc000u, 0x33000000u, 0x477ff000u, 0x7f7fffffu,
                                           0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u};
  constexpr uint64_t kFinite = 11;
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t word = base::mix_seed(seed, i);
    const uint64_t allowed = i / base::kCodeGroupElements % 16 == 3 ? kHard.size() : kFinite;
    uint32_t bits = static_cast<uint32_t>(word & 0x807fffffu) |
                    (static_cast<uint32_t>(word >> 32) % 40 + 100) << 23;
    if (word >> 60 < 3) bits = kHard[(word >> 40) % allowed];
    values[i] = std::bit_cast<float>(positive ? bits & 0x7fffffffu : bits);
  }
  return values;
}

class OpenClMatrix : public testing::TestWithParam<Program> {
 protected:
  using Bytes = std::vector<std::byte>;

  void SetUp() override {
    if (const std::string why = no_opencl(); !why.empty()) GTEST_SKIP() << why;
    layout_ = test_layout(GetParam().format, 0, kCounts.size());
    const auto planes = kernels::rule_planes(GetParam().rule);
    layout_.planes.assign(planes.begin(), planes.end());
    for (size_t i = 0; i < kCounts.size(); ++i) {
      layout_.subgroups[i].first_element = i * 4 * base::kBlockElements;
      layout_.subgroups[i].count = kCounts[i];
    }
  }

  Bytes gradient(uint64_t count, uint64_t step) const {
    const std::vector<float> wide = hard_floats(count, 100 + step, false);
    Bytes narrow(count * base::data_type_bytes(GetParam().gradient));
    kernels::kernels().cast_from_f32(wide.data(), narrow.data(), GetParam().gradient, count);
    return narrow;
  }
  Bytes message(const storage::StoredSubgroup& subgroup, uint64_t step) const {
    const std::vector<float> wide = hard_floats(subgroup.count, 100 + step, false);
    compress::ValueEncoding encoding = compress::ValueEncoding::kBf16;
    if (GetParam().gradient == DataType::kF32) encoding = compress::ValueEncoding::kF32;
    if (GetParam().gradient == DataType::kF16) encoding = compress::ValueEncoding::kF16;
    compress::CompressedWriter writer;
    writer.begin(subgroup.id, subgroup.count, encoding, {});
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      std::vector<uint32_t> indices;
      std::vector<float> values;
      const uint64_t count = std::min(base::kBlockElements, subgroup.count - first);
      for (uint32_t i = 0; i < count; i += 1 + i % 13) {
        indices.push_back(i);
        values.push_back(wide[first + i]);
      }
      writer.add_block(indices, values);
    }
    const auto made = writer.finish();
    return {made.begin(), made.end()};
  }
  std::vector<kernels::StepScalars> scalars(uint64_t step) const {
    const kernels::UpdateRule rule = GetParam().rule;
    const bool sgd = rule == kernels::UpdateRule::kSgdMomentum;
    return {kernels::make_step_scalars({.rule = rule, .nesterov = sgd, .maximize = true},
                                       {.lr = 0.25, .weight_decay = 0.125}, step, 0.7, 4),
            kernels::make_step_scalars({.rule = rule, .beta1 = 0.2}, {.lr = 1e-3}, step, 1, 4)};
  }

  /// The state of a device and what it has sent up after two steps.
  void outcome(ProcessorFactory make_processor, bool compressed,
               std::map<std::string, Bytes>& all) {
    LocalDeviceOptions options;
    options.path = options.name = "card";
    options.slots = 3;
    options.gradient_type = GetParam().gradient;
    if (compressed) options.compressed_block_bytes = 512 * 1024;
    options.groups = groups_;
    options.make_processor = std::move(make_processor);
    auto drive =
        EmulatedDrive::create(*EmulatedDrive::size_for(layout_, storage::Durability::kStep, 0));
    ASSERT_TRUE(drive.ok()) << drive.status().to_string();
    auto device = create_emulated_device(options, layout_, **drive);
    ASSERT_TRUE(device.ok()) << device.status().to_string();
    DeviceDriver driver;
    driver.drive(**device);
    const auto run = [&](Message message) {
      const Status status = driver.run(std::move(message));
      EXPECT_TRUE(status.ok()) << status.to_string();
    };
    run(BeginStep{0});
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      WriteState write{subgroup.id, subgroup.count};
      std::vector<std::vector<float>> planes;
      for (size_t p = 0; p < layout_.planes.size(); ++p) {
        const bool positive = layout_.planes[p] == base::PlaneKind::kVariance;
        planes.push_back(hard_floats(subgroup.count, p + 1, positive));
        write.planes[p] = planes.back().data();
      }
      run(write);
    }
    EXPECT_TRUE(driver.finish_step(0).ok());
    for (uint64_t step = 1; step <= 2; ++step) {
      run(BeginStep{step});
      Update update;
      update.weights_type = GetParam().weights;
      update.scalars = scalars(step);
      for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
        if (!compressed) {
          const Status put = driver.put(subgroup, gradient(subgroup.count, step),
                                        GetParam().gradient, 0, subgroup.count);
          EXPECT_TRUE(put.ok()) << put.to_string();
        } else {
          const Bytes bytes = message(subgroup, step);
          run(PutCompressedGradient{subgroup.id, bytes});
        }
        Bytes& weights = all["weights of step " + std::to_string(step) + " of " +
                             std::to_string(subgroup.count) + " elements"];
        weights.resize(subgroup.count * base::data_type_bytes(update.weights_type));
        update.updates.push_back({subgroup.id, weights.data()});
      }
      run(update);
      EXPECT_TRUE(driver.finish_step(step).ok());
    }
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      for (size_t p = 0; p < layout_.planes.size(); ++p) {
        Bytes& bytes = all["plane " + std::to_string(p) + " of " + std::to_string(subgroup.count) +
                           " elements"];
        bytes.resize(subgroup.count * sizeof(float));
        ReadState read;
        read.subgroup = subgroup.id;
        read.count = subgroup.count;
        read.planes[p] = reinterpret_cast<float*>(bytes.data());
        run(read);
      }
    }
  }

  storage::StoreLayout layout_;
  const std::vector<plan::GroupSpan> groups_ =
      test_groups(4 * kCounts.size() * base::kBlockElements);
};

TEST_P(OpenClMatrix, HasTheBitsOfTheCoresInEveryMemory) {
  for (const bool compressed : {false, true}) {
    std::map<std::string, Bytes> wanted;
    outcome(nullptr, compressed, wanted);
    ASSERT_FALSE(HasFailure());
    for (const OpenClMemory memory :
         {OpenClMemory::kShared, OpenClMemory::kCopied, OpenClMemory::kPeer}) {
      SCOPED_TRACE(base::enum_name(memory));
      SCOPED_TRACE(compressed ? "compressed gradients" : "dense gradients");
      OpenClOptions options;
      options.memory = memory;
      options.pretend_peer = true;
      std::map<std::string, Bytes> found;
      outcome(opencl_processor(options), compressed, found);
      for (const auto& [what, bytes] : wanted) EXPECT_TRUE(found[what] == bytes) << what;
      ASSERT_FALSE(HasFailure());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OpenCl, OpenClMatrix, testing::ValuesIn(programs()),
                         [](const auto& param) { return param.param.name(); });

}  // namespace
}  // namespace smartinf::csd
