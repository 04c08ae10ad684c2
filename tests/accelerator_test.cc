// The accelerator for tests (tests/accelerator) itself: the CPU's numbers, its memory, and that
// each missing event shows.
#include "tests/accelerator/accelerator.h"

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace smartinf::test_accelerator {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::Tensor;

const torch::Device kDevice(torch::kPrivateUse1, 0);
constexpr int64_t kCount = 4096;

void use(const Options& options) { smartinf_test_accelerator_set_options(&options); }

// A side stream that the compute stream waits for, or that waits for it.
class Streams {
 public:
  c10::Stream compute() const { return guard_.getDefaultStream(kDevice); }
  c10::Stream side() const { return side_; }

  static void order(const c10::Stream& first, const c10::Stream& second) {
    c10::Event event(kDevice.type());
    event.record(first);
    event.block(second);
  }

 private:
  c10::impl::VirtualGuardImpl guard_{kDevice.type()};
  c10::Stream side_ = guard_.getStreamFromGlobalPool(kDevice);
};

Tensor pinned(const Tensor& values) {
  Tensor copy = torch::empty(values.sizes(), values.options().pinned_memory(true));
  return copy.copy_(values);
}

Tensor on_device(double value) { return torch::full({kCount}, value, torch::device(kDevice)); }

class AcceleratorTest : public testing::Test {
 protected:
  void SetUp() override { use({}); }
};

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

// Two layers as the trainer's (smartinf/train/model.cc), and their loss.
struct Network {
  static constexpr int64_t kVocabulary = 50;
  static constexpr int64_t kWidth = 32;
  static constexpr int64_t kHeads = 4;
  static constexpr int64_t kKvHeads = 2;
  static constexpr int64_t kHeadWidth = kWidth / kHeads;
  static constexpr int64_t kHidden = 72;
  struct Layer {
    Tensor norm, qkv, output, mlp_norm, gate_up, down;
  };

  Network(const Tensor& all, const torch::Device& device) : weights(all.to(device)) {
    embedding = take({kVocabulary, kWidth});
    for (Layer& layer : layers) {
      layer = {take({kWidth}),
               take({(kHeads + 2 * kKvHeads) * kHeadWidth, kWidth}),
               take({kWidth, kWidth}),
               take({kWidth}),
               take({2 * kHidden, kWidth}),
               take({kWidth, kHidden})};
    }
    norm = take({kWidth});
    head = take({kVocabulary, kWidth});
  }

  Tensor take(const std::vector<int64_t>& shape) {
    const int64_t count = c10::multiply_integers(shape);
    const Tensor weight = weights.narrow(0, taken, count).view(shape).detach();
    taken += count;
    parameters.push_back(weight.requires_grad_(true));
    return weight;
  }

  static Tensor rotated(const Tensor& x) {
    const auto halves = x.chunk(2, -1);
    return x * 0.75 + torch::cat({-halves[1], halves[0]}, -1) * 0.5;
  }

  static Tensor run(const Layer& layer, const Tensor& x) {
    Tensor h = torch::rms_norm(x, {kWidth}, layer.norm, 1e-5);
    const auto qkv = torch::linear(h, layer.qkv)
                         .unflatten(-1, {kHeads + 2 * kKvHeads, kHeadWidth})
                         .split_with_sizes({kHeads, kKvHeads, kKvHeads}, 2);
    const Tensor attended = torch::scaled_dot_product_attention(
        rotated(qkv[0]).transpose(1, 2), rotated(qkv[1]).transpose(1, 2), qkv[2].transpose(1, 2),
        {}, 0, /*is_causal=*/true, {}, /*enable_gqa=*/true);
    const Tensor y = x + torch::linear(attended.transpose(1, 2).flatten(2), layer.output);
    h = torch::rms_norm(y, {kWidth}, layer.mlp_norm, 1e-5);
    const auto gate_up = torch::linear(h, layer.gate_up).chunk(2, -1);
    return y + torch::linear(torch::silu(gate_up[0]) * gate_up[1], layer.down);
  }

  // Forward keeps the layer's input alone; a backward within backward computes the layer again.
  struct Recomputed : torch::autograd::Function<Recomputed> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                          const Layer* layer) {
      context->save_for_backward({x});
      context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
      const torch::NoGradGuard no_grad;
      return run(*layer, x);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      const torch::AutoGradMode with_grad(true);
      const Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
      const auto* layer = reinterpret_cast<const Layer*>(context->saved_data["layer"].toInt());
      torch::autograd::backward({run(*layer, x)}, {gradients[0]});
      return {x.grad(), Tensor()};
    }
  };

  // The loss and the gradients of all parameters, on the CPU.
  std::vector<Tensor> run(const Tensor& tokens, bool recompute) const {
    const Tensor there = tokens.to(weights.device());
    Tensor x = torch::embedding(embedding, there.narrow(1, 0, tokens.size(1) - 1));
    for (const Layer& layer : layers) {
      x = recompute ? Recomputed::apply(x, &layer) : run(layer, x);
    }
    x = torch::linear(torch::rms_norm(x, {kWidth}, norm, 1e-5), head);
    const Tensor loss = torch::cross_entropy_loss(x.flatten(0, 1).to(torch::kFloat32),
                                                  there.narrow(1, 1, tokens.size(1) - 1).flatten());
    loss.backward();
    std::vector<Tensor> results;
    for (const Tensor& parameter : parameters) results.push_back(parameter.grad());
    results.push_back(torch::scalar_tensor(loss.item<float>()));
    for (Tensor& result : results) result = result.cpu();
    return results;
  }

  Tensor weights, embedding, norm, head;
  std::array<Layer, 2> layers;
  std::vector<Tensor> parameters;
  int64_t taken = 0;
};

class NetworkTest : public AcceleratorTest,
                    public testing::WithParamInterface<std::tuple<torch::Dtype, bool>> {};

TEST_P(NetworkTest, GivesTheCpusLossAndGradientsToTheBit) {
  const auto [type, recompute] = GetParam();
  torch::manual_seed(1);
  const Tensor weights = (torch::randn({40000}) * 0.2).to(type);
  const Tensor tokens = torch::randint(Network::kVocabulary, {3, 18});
  const std::vector<Tensor> expected = Network(weights, torch::kCPU).run(tokens, recompute);
  const std::vector<Tensor> results = Network(weights, kDevice).run(tokens, recompute);
  ASSERT_TRUE(expected.back().isfinite().item<bool>());
  ASSERT_EQ(results.size(), expected.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_TRUE(torch::equal(results[i], expected[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(TypesAndRecomputation, NetworkTest,
                         testing::Combine(testing::Values(torch::kFloat32, torch::kBFloat16),
                                          testing::Bool()),
                         [](const auto& test) {
                           return std::string(c10::toString(std::get<0>(test.param))) +
                                  (std::get<1>(test.param) ? "Recomputed" : "Kept");
                         });

TEST_F(AcceleratorTest, ViewsShareTheirMemory) {
  const Tensor all = torch::zeros({4, 6}, torch::device(kDevice));
  all.narrow(1, 2, 2).t().fill_(3);
  all.view({24}).narrow(0, 0, 2).copy_(torch::tensor({1.0F, 2.0F}));
  const Tensor expected = torch::zeros({4, 6});
  expected.narrow(1, 2, 2).fill_(3);
  expected.view({24}).narrow(0, 0, 2).copy_(torch::tensor({1.0F, 2.0F}));
  EXPECT_TRUE(torch::equal(all.cpu(), expected));
  Tensor part = torch::empty({0}, torch::device(kDevice));
  part.set_(all.storage(), 6, {2, 3}, {6, 2});
  EXPECT_TRUE(torch::equal(part.cpu(), expected.as_strided({2, 3}, {6, 2}, 6)));
}

TEST_F(AcceleratorTest, CopiesConvertAndKeepStrides) {
  const Tensor values = torch::randn({5, 7});
  const Tensor there = torch::empty({7, 5}, torch::dtype(torch::kBFloat16).device(kDevice));
  there.t().copy_(values);
  EXPECT_TRUE(torch::equal(there.cpu(), values.t().to(torch::kBFloat16)));
  EXPECT_TRUE(torch::equal(there.t().to(torch::kCPU, torch::kFloat32),
                           values.to(torch::kBFloat16).to(torch::kFloat32)));
}

TEST_F(AcceleratorTest, OutputsWithoutElementsGrow) {
  EXPECT_TRUE(torch::equal(torch::arange(5, torch::device(kDevice)).cpu(), torch::arange(5)));
}

TEST_F(AcceleratorTest, MemoryBeyondTheCapIsRefusedWithTheNumbers) {
  const uint64_t before = smartinf_test_accelerator_memory().current_bytes;
  use({.memory_bytes = before + 4096});
  const Tensor first = torch::empty({768}, torch::device(kDevice));
  EXPECT_THROW(torch::empty({257}, torch::device(kDevice)), c10::OutOfMemoryError);
  const std::string error = error_of([] { torch::empty({257}, torch::device(kDevice)); });
  EXPECT_THAT(error, AllOf(HasSubstr("1536 bytes are wanted"),
                           HasSubstr(std::to_string(before + 3072) + " of " +
                                     std::to_string(before + 4096))));
  EXPECT_EQ(torch::empty({256}, torch::device(kDevice)).numel(), 256);
}

TEST_F(AcceleratorTest, MemoryIsCountedWithItsPeak) {
  const uint64_t before = smartinf_test_accelerator_memory().current_bytes;
  smartinf_test_accelerator_reset_peak();
  {
    const Tensor kept = torch::empty({256}, torch::device(kDevice));
    torch::empty({512}, torch::device(kDevice));
    torch::empty({1}, torch::device(kDevice));
    EXPECT_EQ(smartinf_test_accelerator_memory().current_bytes, before + 1024);
  }
  EXPECT_EQ(smartinf_test_accelerator_memory().current_bytes, before);
  EXPECT_EQ(smartinf_test_accelerator_memory().peak_bytes, before + 3072);
  smartinf_test_accelerator_reset_peak();
  EXPECT_EQ(smartinf_test_accelerator_memory().peak_bytes, before);
}

TEST_F(AcceleratorTest, MemoryIsPoisonedUntilItIsWritten) {
  for (const torch::Dtype type : {torch::kFloat32, torch::kBFloat16}) {
    // A size that nothing has freed before.
    const Tensor fresh = torch::empty({12345}, torch::dtype(type).device(kDevice));
    EXPECT_TRUE(fresh.cpu().isnan().all().item<bool>());
  }
}

TEST_F(AcceleratorTest, TheHostCannotTouchItsMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Tensor there = torch::ones({4}, torch::device(kDevice));
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile float*>(there.data_ptr())), "");
  EXPECT_DEATH(*static_cast<volatile float*>(there.data_ptr()) = 1, "");
}

TEST_F(AcceleratorTest, OnlyPinnedMemoryIsCopiedLate) {
  const Tensor values = torch::ones({kCount});
  const Tensor ready = pinned(values);
  EXPECT_TRUE(ready.is_pinned());
  EXPECT_TRUE(ready.narrow(0, 100, 4).is_pinned());
  EXPECT_FALSE(values.is_pinned());
  const Tensor there = torch::empty({kCount}, torch::device(kDevice));
  const c10::Stream stream = Streams().compute();
  there.copy_(values, /*non_blocking=*/true);
  EXPECT_TRUE(stream.query());
  smartinf_test_accelerator_hold_copies(true);
  there.copy_(ready, /*non_blocking=*/true);
  EXPECT_FALSE(stream.query());
  smartinf_test_accelerator_hold_copies(false);
  there.copy_(ready);
  EXPECT_TRUE(stream.query());
}

// Times of the events themselves: a lower bound, which no load of the machine breaks.
TEST_F(AcceleratorTest, DelayAndLinkTakeTheirTime) {
  use({.link_bytes_per_s = 1 << 20, .delay_us = 20000});
  const Tensor ready = pinned(torch::ones({1 << 13}));  // a 32nd of a second
  const Tensor there = torch::empty({1 << 13}, torch::device(kDevice));
  const Streams streams;
  c10::Event first(kDevice.type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event second(kDevice.type(), c10::EventFlag::BACKEND_DEFAULT);
  first.record(streams.compute());
  first.synchronize();
  there.copy_(ready, /*non_blocking=*/true);
  second.record(streams.compute());
  second.synchronize();
  EXPECT_GE(first.elapsedTime(second), 20 + 31);
}

TEST_F(AcceleratorTest, TheHostReadsPoisonBeforeALateCopyHasCome) {
  const Tensor host = pinned(torch::zeros({kCount}));
  smartinf_test_accelerator_hold_copies(true);
  host.copy_(on_device(2), /*non_blocking=*/true);
  EXPECT_TRUE(host.isnan().all().item<bool>());
  smartinf_test_accelerator_hold_copies(false);
  Streams().compute().synchronize();
  EXPECT_TRUE(host.eq(2).all().item<bool>());
}

TEST_F(AcceleratorTest, ACopyOnASideStreamGivesWrongNumbersUnlessItsEventIsWaitedFor) {
  use({.delay_us = 10000, .check_order = false});
  const Streams streams;
  const Tensor ready = pinned(torch::ones({kCount}));
  for (int i = 0; i < 10; ++i) {
    for (const bool waited : {true, false}) {
      const Tensor there = torch::empty({kCount}, torch::device(kDevice));
      smartinf_test_accelerator_hold_copies(!waited);
      {
        const c10::StreamGuard on_side(streams.side());
        there.copy_(ready, /*non_blocking=*/true);
      }
      if (waited) Streams::order(streams.side(), streams.compute());
      const auto sum = there.sum().item<float>();
      EXPECT_EQ(sum == kCount, waited) << sum;
      smartinf_test_accelerator_hold_copies(false);
      streams.side().synchronize();
    }
  }
}

TEST_F(AcceleratorTest, MemoryFreedUnderASideStreamsCopyGivesWrongNumbers) {
  use({.check_order = false});
  for (const bool recorded : {true, false}) {
    const Streams streams;
    const Tensor host = pinned(torch::zeros({kCount}));
    Tensor there = on_device(2);
    smartinf_test_accelerator_hold_copies(true);
    {
      const c10::StreamGuard on_side(streams.side());
      host.copy_(there, /*non_blocking=*/true);
    }
    if (recorded) there.record_stream(streams.side());
    there = Tensor();
    const Tensor other = on_device(3);
    smartinf_test_accelerator_hold_copies(false);
    streams.side().synchronize();
    EXPECT_EQ(host.eq(2).all().item<bool>(), recorded);
  }
}

// Each of the orders that a streamed model needs, with and without its event.
TEST_F(AcceleratorTest, AReadOfWhatASideStreamCopiesInNeedsAnEvent) {
  const Streams streams;
  const Tensor ready = pinned(torch::ones({kCount}));
  const Tensor slot = torch::empty({kCount}, torch::device(kDevice));
  const auto copy_in = [&] {
    const c10::StreamGuard on_side(streams.side());
    slot.copy_(ready, /*non_blocking=*/true);
  };
  copy_in();
  EXPECT_THAT(error_of([&] { slot.sum(); }),
              AllOf(HasSubstr("no event orders stream 0, which reads (aten::sum)"),
                    HasSubstr("writes the same bytes (copy_)")));
  Streams::order(streams.side(), streams.compute());
  EXPECT_EQ(slot.sum().item<float>(), kCount);
  EXPECT_EQ(smartinf_test_accelerator_order_errors(), 1);
}

TEST_F(AcceleratorTest, ASlotThatIsStillComputedWithNeedsAnEventBeforeItsNextCopy) {
  const Streams streams;
  const Tensor ready = pinned(torch::ones({kCount}));
  const Tensor slots = torch::zeros({2 * kCount}, torch::device(kDevice));
  const Tensor slot = slots.narrow(0, 0, kCount);
  Streams::order(streams.compute(), streams.side());
  const Tensor twice = slot * 2;
  const c10::StreamGuard on_side(streams.side());
  slots.narrow(0, kCount, kCount).copy_(ready, /*non_blocking=*/true);  // the other slot
  EXPECT_THAT(error_of([&] { slot.copy_(ready, /*non_blocking=*/true); }),
              AllOf(HasSubstr("writes (copy_)"), HasSubstr("reads the same bytes (aten::mul)")));
  Streams::order(streams.compute(), streams.side());
  slot.copy_(ready, /*non_blocking=*/true);
}

TEST_F(AcceleratorTest, APinnedBufferThatIsStillWrittenNeedsAnEventBeforeItIsCopiedOn) {
  const Streams streams;
  const Tensor buffer = pinned(torch::zeros({kCount}));
  const Tensor out = on_device(2);
  const Tensor in = torch::empty({kCount}, torch::device(kDevice));
  buffer.copy_(out, /*non_blocking=*/true);
  const c10::StreamGuard on_side(streams.side());
  EXPECT_THAT(error_of([&] { in.copy_(buffer, /*non_blocking=*/true); }),
              HasSubstr("writes the same bytes (copy_)"));
  Streams::order(streams.compute(), streams.side());
  in.copy_(buffer, /*non_blocking=*/true);
  EXPECT_EQ(in.sum().item<float>(), 2 * kCount);
}

TEST_F(AcceleratorTest, AWaitOfTheHostOrdersAsAnEventDoes) {
  const Streams streams;
  const Tensor ready = pinned(torch::ones({kCount}));
  const Tensor slot = torch::zeros({kCount}, torch::device(kDevice));
  streams.compute().synchronize();
  {
    const c10::StreamGuard on_side(streams.side());
    slot.copy_(ready, /*non_blocking=*/true);
  }
  streams.side().synchronize();
  EXPECT_EQ(slot.sum().item<float>(), kCount);  // item() waits for the compute stream
  const c10::StreamGuard on_side(streams.side());
  slot.copy_(ready, /*non_blocking=*/true);
  EXPECT_EQ(smartinf_test_accelerator_order_errors(), 0);
}

TEST_F(AcceleratorTest, MemoryFreedUnderASideStreamIsAnErrorOfTheNextOperator) {
  for (const bool recorded : {true, false}) {
    use({});
    const Streams streams;
    const Tensor host = pinned(torch::zeros({kCount}));
    Tensor there = on_device(2);
    Streams::order(streams.compute(), streams.side());
    {
      const c10::StreamGuard on_side(streams.side());
      host.copy_(there, /*non_blocking=*/true);
    }
    if (recorded) there.record_stream(streams.side());
    there = Tensor();
    EXPECT_THAT(error_of([] { on_device(1); }), HasSubstr(recorded ? "none" : "frees it"));
  }
}

}  // namespace
}  // namespace smartinf::test_accelerator
