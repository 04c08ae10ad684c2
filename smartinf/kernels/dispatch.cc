// Which instruction set's kernels run: resolved once, at the first use.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

#include "smartinf/kernels/tile_kernels_simd.h"
#include "smartinf/kernels/update.h"

namespace smartinf::kernels {
namespace {

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](unsigned char x, unsigned char y) {
    return std::tolower(x) == std::tolower(y);
  });
}

struct Resolution {
  const KernelTable* table = nullptr;
  base::Status status;
};

Resolution resolve() {
  const char* forced = std::getenv("SMARTINF_FORCE_ISA");
  if (forced == nullptr || *forced == '\0') return {supported_tables().back(), {}};
  base::Result<const KernelTable*> found = find_table(forced);
  if (found.ok()) return {found.value(), {}};
  return {supported_tables().front(), std::move(found).status().with_context("SMARTINF_FORCE_ISA")};
}

const Resolution& resolution() {
  static const Resolution kResolution = resolve();
  return kResolution;
}

}  // namespace

std::vector<const KernelTable*> supported_tables() {
  static const std::vector<KernelTable> kTables = [] {
    std::vector<KernelTable> tables{KernelTable(scalar_tiles())};
    for (const TileKernels& tiles : simd_tiles()) tables.emplace_back(tiles);
    return tables;
  }();
  std::vector<const KernelTable*> pointers;
  for (const KernelTable& table : kTables) pointers.push_back(&table);
  return pointers;
}

base::Result<const KernelTable*> find_table(std::string_view isa) {
  std::string names;
  for (const KernelTable* table : supported_tables()) {
    if (same_name(table->isa(), isa)) return table;
    if (!names.empty()) names += ", ";
    names += table->isa();
  }
  return base::Status(base::ErrorCode::kUnsupported,
                      "no kernels for the instruction set '" + std::string(isa) + "'",
                      "This machine has: " + names + ".");
}

const KernelTable& kernels() { return *resolution().table; }

base::Status forced_isa_status() { return resolution().status; }

}  // namespace smartinf::kernels
