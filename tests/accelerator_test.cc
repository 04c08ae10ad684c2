#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/accelerator/accelerator.h"

namespace smartinf::test_accelerator {
namespace {

const torch::Device kDevice(torch::kPrivateUse1, 0);

TEST(Accelerator, MultipliesLikeTheCpu) {
  const torch::Tensor a = torch::randn({33, 65});
  const torch::Tensor b = torch::randn({65, 17});
  const torch::Tensor c = torch::matmul(a.to(kDevice), b.to(kDevice));
  EXPECT_EQ(c.device().str(), "test_accelerator:0");
  EXPECT_TRUE(torch::equal(c.cpu(), torch::matmul(a, b)));
}

}  // namespace
}  // namespace smartinf::test_accelerator
