#include "smartinf/train/adapter_base.h"

#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/model/safetensors.h"
#include "smartinf/train/model_source.h"

namespace smartinf::train {
namespace {

using ::testing::HasSubstr;

class AdapterBase : public testing::Test {
 protected:
  /// A folder with weights that are all `fill`, but for one in the middle.
  void write(float fill, float middle) {
    const plan::ParameterSpace space = model::make_parameter_space(architecture_).value();
    std::vector<model::TensorInfo> tensors;
    for (const plan::ParameterRange& range : space.ranges()) {
      tensors.push_back({range.name, base::DataType::kF32, range.shape});
    }
    auto writer = model::SafetensorsWriter::create(folder() + "/model.safetensors", tensors, {});
    ASSERT_TRUE(writer.ok());
    std::vector<float> all(space.count(), fill);
    all[all.size() / 2] = middle;
    ASSERT_TRUE(writer->append(base::DataType::kF32, all).ok());
    ASSERT_TRUE(writer->finish().ok());
  }
  std::string folder() const { return scratch_.path().string(); }
  model::WeightFiles files() const {
    return model::WeightFiles::open(folder(), architecture_).value();
  }
  base::Status opened(const Position& there) const {
    return open_adapter_base(folder(), architecture_, there.to_json()).status();
  }

  const base::Scratch scratch_;
  const model::Architecture architecture_ = [] {
    ModelOptions options;
    options.layers = 2;
    options.width = 256;
    options.vocabulary = 4096;
    return architecture_of(options, 32);
  }();
};

TEST_F(AdapterBase, AllWeightsCount) {
  write(1, 1);
  Position there;
  there.base = files().digest().value();
  EXPECT_TRUE(opened(there).ok());
  EXPECT_TRUE(opened(Position{}).ok()) << "a run without adapters has none";
  write(1, std::nextafterf(1, 2));
  EXPECT_EQ(opened(there).code(), base::ErrorCode::kMismatch);
  write(1, NAN);
  EXPECT_THAT(opened(there).to_string(), HasSubstr(" is nan"));
}

TEST_F(AdapterBase, AStateOfAnEarlierVersionHasTheFilesEnds) {
  write(1, 1);
  const std::string ends = std::to_string(files().digest_of_ends().value());
  const auto there = Position::from_json(
      R"({"windows":1,"data_seed":1,"sequence":32,"corpus":1,"base":)" + ends + "}");
  ASSERT_TRUE(there.ok());
  EXPECT_EQ(there->base, 0u);
  const std::string as_written = R"({"windows":1,"data_seed":1,"sequence":32,"corpus":1,"base":)";
  EXPECT_TRUE(open_adapter_base(folder(), architecture_, as_written + ends + "}").ok());
  write(2, 2);
  EXPECT_EQ(open_adapter_base(folder(), architecture_, as_written + ends + "}").status().code(),
            base::ErrorCode::kMismatch);
}

}  // namespace
}  // namespace smartinf::train
