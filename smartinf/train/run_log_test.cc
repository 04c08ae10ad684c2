#include "smartinf/train/run_log.h"

#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"

namespace smartinf::train {
namespace {

using ::testing::HasSubstr;

constexpr const char* kLog =
    "{\"step\":1,\"loss\":2.5,\"seconds\":0.5,\"devices\":[{\"name\":\"a\"}]}\n"
    "{\"step\":1,\"validation_loss\":3.25,\"evaluation_loss\":{\"a, \\\"b\\\"\":4}}\n"
    "{\"step\":1,\"checkpoint\":\"c\",\"seconds\":99}\n"
    "{\"step\":2,\"loss\":null,\"seconds\":0.25,\"skipped\":\"not finite\"}\n"
    "{\"step\":2,\"loss\":0.10000000000000001,\"seconds\":0.75,\"wrong_guess\":true}\n"
    "{\"step\":2,\"layers\":{\"model.layers.0\":{\"weight_norm\":7}}}\n"
    "{\"step\":3,\"loss\":1.5,\"sec";  // a kill has cut it

class RunLog : public testing::Test {
 protected:
  void write(const std::string& text) const {
    std::ofstream(scratch_.path() / "log.jsonl", std::ios::binary) << text;
  }
  std::string folder() const { return scratch_.path().string(); }

 private:
  const base::Scratch scratch_;
};

TEST_F(RunLog, IsOneLineForEachStepWithItsValidationsAndLayers) {
  write(kLog);
  const auto rows = read_log(folder());
  ASSERT_TRUE(rows.ok()) << rows.status().to_string();
  EXPECT_EQ(log_to_csv(*rows),
            "step,loss,validation_loss,seconds,\"evaluation_loss/a, \"\"b\"\"\","
            "layers/model.layers.0/weight_norm,skipped,wrong_guess\n"
            "1,2.5,3.25,0.5,4,,,\n"
            "2,,,0.25,,,not finite,\n"
            "2,0.1,,0.75,,7,,true\n");
}

TEST_F(RunLog, KeepsTheLinesOneByOneForWritersThatAppend) {
  write(kLog);
  const auto rows = read_log(folder());
  ASSERT_TRUE(rows.ok());
  ASSERT_EQ(rows->size(), 5u);
  EXPECT_EQ(rows->back().to_json(), "{\"layers/model.layers.0/weight_norm\":7,\"step\":2}");
}

TEST_F(RunLog, ThatHasNothingYetHasNoRows) {
  write("");
  const auto rows = read_log(folder());
  ASSERT_TRUE(rows.ok());
  EXPECT_EQ(log_to_csv(*rows), "step\n");
}

TEST_F(RunLog, LinesThatAreNoneAreLeftOutWhateverTheirLength) {
  write("{\"step\":1,\"loss\":2}\n" + std::string(size_t{40} << 20, '[') +
        "\n[1]\n{\"step\":\"2\",\"loss\":1}\n\n{\"step\":3,\"loss\":4}");
  const auto rows = read_log(folder());
  ASSERT_TRUE(rows.ok());
  EXPECT_EQ(log_to_csv(*rows), "step,loss\n1,2\n3,4\n");
}

TEST_F(RunLog, IsNotInEveryFolder) {
  const auto rows = read_log(folder());
  EXPECT_EQ(rows.status().code(), base::ErrorCode::kNotFound);
  EXPECT_THAT(rows.status().to_string(), HasSubstr("has no log.jsonl"));
}

}  // namespace
}  // namespace smartinf::train
