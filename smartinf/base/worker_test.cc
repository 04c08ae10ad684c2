#include "smartinf/base/worker.h"

#include <atomic>
#include <future>
#include <memory>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(Worker, WorksOffWhatWasPostedInOrder) {
  std::vector<int> done;  // of the worker's thread, read when it has ended
  {
    Worker<std::unique_ptr<int>> worker("test",
                                        [&](std::unique_ptr<int> item) { done.push_back(*item); });
    for (int i = 0; i < 100; ++i) worker.post(std::make_unique<int>(i));
  }
  ASSERT_EQ(done.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(done[static_cast<size_t>(i)], i);
}

TEST(Worker, SeveralThreadsWorkAtOnce) {
  std::atomic<int> begun = 0;
  std::promise<void> all;
  const std::shared_future<void> all_here = all.get_future().share();
  // Ends only if each of the four items has a thread of its own.
  Worker<int> worker(
      "test",
      [&](int) {
        if (++begun == 4) all.set_value();
        all_here.wait();
      },
      4);
  for (int i = 0; i < 4; ++i) worker.post(i);
  all_here.wait();
  EXPECT_EQ(begun, 4);
}

TEST(Worker, WorkMayPostMore) {
  std::promise<void> end;
  Worker<int>* self = nullptr;
  int sum = 0;
  Worker<int> worker("test", [&](int item) {
    sum += item;
    if (item == 0) return end.set_value();
    self->post(item - 1);
  });
  self = &worker;
  worker.post(4);
  end.get_future().wait();
  EXPECT_EQ(sum, 10);
}

TEST(Worker, CancelForgetsWhatHasNotBegun) {
  std::promise<void> begun, go_on;
  std::vector<int> done;
  {
    Worker<int> worker("test", [&](int item) {
      begun.set_value();  // throws at the second call
      go_on.get_future().wait();
      done.push_back(item);
    });
    worker.post(1);
    worker.post(2);
    begun.get_future().wait();
    EXPECT_FALSE(worker.idle());
    EXPECT_EQ(worker.cancel(), 1u);
    EXPECT_TRUE(worker.idle());
    go_on.set_value();
  }
  EXPECT_EQ(done, std::vector{1});
}

TEST(Worker, WorkThatHangsIsLeftBehind) {
  struct Owned {
    std::promise<void> go_on, ended;
    std::shared_future<void> may_go_on = go_on.get_future().share();
  };
  const auto owned = std::make_shared<Owned>();
  {
    Worker<int> worker("test", [owned](int) {
      owned->may_go_on.wait();
      owned->ended.set_value();
    });
    worker.post(1);
    worker.detach();
  }
  owned->go_on.set_value();
  owned->ended.get_future().wait();
}

}  // namespace
}  // namespace smartinf::base
