// Runs a fuzz target without libFuzzer, for every build and every compiler: over its corpus as it
// is, then over damaged copies of it, the same ones every time.
//   superblock_replay fuzz/corpus/superblock [MUTATIONS]
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::vector<uint8_t>;

/// A few bits, bytes or spans changed, or the end cut off.
Input mutate(const std::vector<Input>& corpus, std::mt19937_64& random) {
  const auto below = [&](size_t bound) { return bound == 0 ? 0 : random() % bound; };
  Input input = corpus[below(corpus.size())];
  for (uint64_t changes = 1 + below(4); changes > 0 && !input.empty(); --changes) {
    const size_t at = below(input.size());
    switch (below(6)) {
      case 0:
        input[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        input[at] = static_cast<uint8_t>(random());
        break;
      case 2: {  // a number at its limits
        const uint8_t value = below(2) == 0 ? 0x00 : 0xff;
        std::fill_n(input.begin() + static_cast<std::ptrdiff_t>(at),
                    std::min<size_t>(8, input.size() - at), value);
        break;
      }
      case 3:
        input.resize(at);
        break;
      case 4:
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), 1 + below(16),
                     static_cast<uint8_t>(random()));
        break;
      default: {  // a span of another input
        const Input& other = corpus[below(corpus.size())];
        const size_t length = std::min({below(64), other.size(), input.size() - at});
        std::copy_n(other.begin() + static_cast<std::ptrdiff_t>(below(other.size() - length + 1)),
                    length, input.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER [MUTATIONS]\n", argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<Input> corpus;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    (void)LLVMFuzzerTestOneInput(corpus.back().data(), corpus.back().size());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no input there\n", argv[1]);
    return 1;
  }
  const uint64_t mutations = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20'000;
  std::mt19937_64 random(1);
  for (uint64_t i = 0; i < mutations; ++i) {
    const Input input = mutate(corpus, random);
    (void)LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu inputs and %llu mutations\n", corpus.size(),
              static_cast<unsigned long long>(mutations));
  return 0;
}
