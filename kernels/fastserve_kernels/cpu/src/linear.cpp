// y = x W^T + b with W [out, in] packed once, in panels of its own type, in INT8, with a scale for each
// row of W, or in formats of few bits. Rows of x may be in groups, each with a W of its own: the experts
// of a mixture. A row's result does not depend on what it is batched with, bit for bit.
#include <algorithm>
#include <vector>

#include "aligned.h"
#include "int8_panels.h"
#include "products.h"
#include "quantized_panels.h"
#include "rounded_product.h"
#include "team.h"

namespace fastserve {

// Packed rows that are multiplied with all panels before the next ones: half a typical second-level
// cache.
#if defined(USES_AMX)
constexpr int64_t BLOCK_BYTES = 1 << 20;
#elif defined(__AVX512F__)
constexpr int64_t BLOCK_BYTES = 512 << 10;
#else
constexpr int64_t BLOCK_BYTES = 256 << 10;
#endif

// A single tile of so few elements is packed by each thread for itself, which takes less time than to wait.
constexpr int64_t FEW_ELEMENTS = 2048;

// With so few tiles the way of panels from memory is what takes time: all their steps are multiplied at once.
constexpr int64_t FEW_TILES = 4;

// Where the sums with one panel go: PAIR columns of y, or what is left of them.
template <typename T>
struct Output {
    T* y;         // [rows, out], from the first of these columns on
    int64_t out;  // elements of a row
    int width;
    Pair scale, bias;
    bool relu;

    // Inlined: a Pair that is passed goes through memory.
    __attribute__((always_inline)) void write(int64_t row, Pair sum) const {
        sum = {sum.a * scale.a + bias.a, sum.b * scale.b + bias.b};
        if (relu) {
            // Written so that a NaN passes through.
            sum.a = sum.a < 0.f ? vf{} : sum.a;
            sum.b = sum.b < 0.f ? vf{} : sum.b;
        }
        store_pair_n(y + row * out, sum, width);
    }
};

static int64_t panels_of(int64_t out) { return (out + PAIR - 1) / PAIR; }

template <typename T>
static void pack(const T* weight, T* panels, int64_t out, int64_t in, int64_t stride) {
    const int64_t count = panels_of(out);
#pragma omp parallel for
    for (int64_t p = 0; p < count; ++p)
        pack_panel([&](int64_t n) { return weight + (p * PAIR + n) * stride; }, out - p * PAIR, in,
                   panels + p * steps_of<T>(in) * STEP_SIZE<T>);
}

// A panel's elements are narrowed to bytes: whole numbers from -127 to 127.
template <typename T>
static void pack_int8(const int8_t* weight, int8_t* panels, int64_t out, int64_t in, int64_t stride) {
    const int64_t count = panels_of(out), size = steps_of<T>(in) * STEP_SIZE<T>;
#pragma omp parallel
    {
        AlignedVector<T> column(in), panel(size);
#pragma omp for
        for (int64_t p = 0; p < count; ++p) {
            const auto column_of = [&](int64_t n) {
                const int8_t* row = weight + (p * PAIR + n) * stride;
                for (int64_t i = 0; i < in; ++i) column[i] = from_float<T>(row[i]);
                return column.data();
            };
            pack_panel(column_of, out - p * PAIR, in, panel.data());
            for (int64_t i = 0; i < size; i += STEP_SIZE<T>)
                Int8Step<T>::narrow(panel.data() + i, panels + p * size + i);
        }
    }
}

// Rows of y, from `first` up to `last`, that have one weight.
template <typename T>
struct Group {
    const void* panels;
    const T *scale, *bias;  // [out]; without a scale it is 1
    int64_t first, last;
};

// The row of x for a row of y.
template <typename T>
struct RowsOfX {
    const T* x;
    int64_t stride;
    const int32_t* numbers;  // null: the row of x has the number of that of y

    const T* operator()(int64_t row) const { return x + (numbers ? numbers[row] : row) * stride; }
};

// In which order packed rows are multiplied. A block's tiles are packed together, and its batches are
// then multiplied with all panels of their groups.
struct Plan {
    struct Tile {
        int64_t first, height;  // rows of y
    };
    struct Batch {
        size_t group;
        int64_t first_tile, end_tile;
    };
    struct Block {
        int64_t first_tile, end_tile, first_batch, end_batch;
    };
    std::vector<Tile> tiles;
    std::vector<Batch> batches;
    std::vector<Block> blocks;

    // P is the kind of product; a block has `most_tiles` at most. A group is divided only if it has
    // more than that, as each part reads the weight again.
    template <typename P, typename T>
    static Plan of(const std::vector<Group<T>>& groups, int64_t most_tiles) {
        Plan plan;
        int64_t room = 0;
        for (size_t group = 0; group < groups.size(); ++group) {
            const int64_t first = groups[group].first, rows = groups[group].last - first;
            const int64_t count = (rows + P::ROWS - 1) / P::ROWS;
            if (count > room) room = 0;
            for (int64_t tile = 0; tile < count;) {
                if (room == 0) {
                    plan.blocks.push_back({(int64_t)plan.tiles.size(), 0,
                                           (int64_t)plan.batches.size(), 0});
                    room = most_tiles;
                }
                const int64_t end = std::min(count, tile + room), first_tile = plan.tiles.size();
                room -= end - tile;
                for (; tile < end; ++tile) {
                    const int64_t row = P::first_row(tile, count, rows);
                    plan.tiles.push_back({first + row, P::first_row(tile + 1, count, rows) - row});
                }
                plan.batches.push_back({group, first_tile, (int64_t)plan.tiles.size()});
                plan.blocks.back().end_tile = plan.tiles.size();
                plan.blocks.back().end_batch = plan.batches.size();
            }
        }
        return plan;
    }
};

// P is the kind of product. count: panels of a weight, or of that with the most.
template <typename Panels, typename T, typename P = Product<T>>
static void linear(const Team* team, const std::vector<Group<T>>& groups, const RowsOfX<T>& row_of_x,
                   T* y, int64_t in, int64_t out, int64_t count, bool relu) {
    using X = typename P::X;
    const int64_t steps = P::steps(in);
    const int64_t tile_size = P::ROWS * std::max<int64_t>(1, steps);
    const int64_t most_tiles =
        std::max<int64_t>(1, BLOCK_BYTES / (tile_size * (int64_t)sizeof(X)));
    const Plan plan = Plan::of<P>(groups, most_tiles);
    const int64_t tiles_at_a_time = std::min<int64_t>(plan.tiles.size(), most_tiles);
    const bool packs_alone =
        plan.tiles.size() == 1 && plan.tiles[0].height * in <= FEW_ELEMENTS;
    const auto output_of = [&](const Group<T>& group, Columns columns) {
        const auto [column, width] = columns;
        return Output<T>{
            y + column,
            out,
            width,
            group.scale ? load_pair_n(group.scale + column, width) : Pair{splat(1.f), splat(1.f)},
            group.bias ? load_pair_n(group.bias + column, width) : Pair{},
            relu};
    };
    in_team(team, true, [&](const Team& own) {
        [[maybe_unused]] const typename P::Unit unit{};
        Panels weights(steps);
        static thread_local AlignedVector<X> packed_alone;
        if (packs_alone) packed_alone.resize(tile_size);
        X* const packed = packs_alone ? packed_alone.data()
                                      : own.buffer<X>(0, tiles_at_a_time * tile_size);
        static thread_local AlignedVector<float> sums_of_tiles;
        const size_t most_sums = tiles_at_a_time * P::ROWS * PAIR;
        if (sums_of_tiles.size() < most_sums) sums_of_tiles.resize(most_sums);
        for (const Plan::Block& block : plan.blocks) {
            if (&block != plan.blocks.data()) own.barrier();  // all have used what is packed
            own.deal((block.end_batch - block.first_batch) * count);
            const int64_t num_tiles = block.end_tile - block.first_tile;
            const auto [first_tile, end_tile] =
                packs_alone ? Team::Range{0, num_tiles} : own.part(num_tiles);
            for (int64_t place = first_tile; place < end_tile; ++place) {
                const auto [first, height] = plan.tiles[block.first_tile + place];
                P::pack([&, row = first](int64_t m) { return row_of_x(row + m); }, height, in,
                        packed + place * tile_size);
            }
            if (!packs_alone) own.barrier();
            // Panel by panel, those of one batch after the other.
            for (int64_t item; (item = own.take()) >= 0;) {
                const Plan::Batch& batch = plan.batches[block.first_batch + item / count];
                const int64_t panel = item % count;
                weights.use(groups[batch.group].panels);
                const Columns columns = weights.columns(panel, out);
                if (columns.count <= 0) continue;  // another group's weight has more panels
                const Output<T> output = output_of(groups[batch.group], columns);
                float* const sums = sums_of_tiles.data();
                if constexpr (Panels::ROWS_AT_A_TIME > 0) {
                    const Plan::Tile& last = plan.tiles[batch.end_tile - 1];
                    const int64_t first_row = plan.tiles[batch.first_tile].first;
                    const int64_t rows = last.first + last.height - first_row;
                    if (weights.multiplies(panel, rows)) {
                        const X* const x = packed + (batch.first_tile - block.first_tile) * tile_size;
                        const int64_t most = Panels::ROWS_AT_A_TIME, parts = (rows + most - 1) / most;
                        for (int64_t part = 0; part < parts; ++part) {
                            const int64_t begin = part * most, some = std::min(most, rows - begin);
                            weights.multiply(panel, x + begin / P::ROWS * tile_size, tile_size, some,
                                             sums, weights.next(panel, part, parts));
                            for (int64_t m = 0; m < some; ++m)
                                output.write(first_row + begin + m, load_pair(sums + m * PAIR));
                        }
                        continue;
                    }
                }
                if constexpr (Panels::HAS_STEPS) {
                    const int64_t tiles = batch.end_tile - batch.first_tile;
                    const int64_t pass_steps =
                        std::min(Panels::PASS_STEPS, tiles > FEW_TILES ? P::PASS_STEPS : steps);
                    int64_t begin = 0, end;
                    do {  // once for rows without elements, too
                        end = begin + std::min(pass_steps, steps - begin);
                        const auto of_steps = weights.steps(panel, begin, end);
                        for (int64_t tile = 0; tile < tiles; ++tile) {
                            const auto [first, height] = plan.tiles[batch.first_tile + tile];
                            const int64_t place = batch.first_tile + tile - block.first_tile;
                            float* const of_tile = sums + tile * P::ROWS * PAIR;
                            P::of_tile(of_tile, PAIR, packed + place * tile_size, height, of_steps,
                                       begin, end, weights.next(panel, tile, tiles));
                            for (int64_t m = 0; m < height && end == steps; ++m)
                                output.write(first + m, load_pair(of_tile + m * PAIR));
                        }
                        begin = end;
                    } while (begin < steps);
                }
            }
        }
    });
}

// All rows have the weight that is given.
template <typename Panels, typename T>
static void linear(const Team* team, const T* x, const void* panels, const T* scale, const T* bias,
                   T* y, int64_t rows, int64_t in, int64_t out, int64_t x_stride, bool relu) {
    linear<Panels, T>(team, {{panels, scale, bias, 0, rows}}, {x, x_stride, nullptr}, y, in, out,
                      panels_of(out), relu);
}

// Elements of a packed weight.
template <typename T>
static int64_t packed_size(int64_t out, int64_t in) {
    return panels_of(out) * steps_of<T>(in) * STEP_SIZE<T>;
}

// The groups that have rows, by where each one's begin; scales and biases of all groups, one after the
// other. panels_of_group(g) are the panels of group g.
template <typename T, typename F>
static std::vector<Group<T>> groups_with_rows(int64_t count, const int32_t* starts,
                                              const F& panels_of_group, const T* scales,
                                              const T* biases, int64_t out) {
    std::vector<Group<T>> groups;
    for (int64_t g = 0; g < count; ++g)
        if (starts[g] < starts[g + 1])
            groups.push_back({panels_of_group(g), scales ? scales + g * out : nullptr,
                              biases ? biases + g * out : nullptr, starts[g], starts[g + 1]});
    return groups;
}

}  // namespace fastserve

// Elements that the packed form of a weight [out, in] takes.
extern "C" int64_t fs_packed_size(int64_t dtype, int64_t out, int64_t in) {
    return fastserve::with_type(dtype, [&](auto type) {
        return fastserve::packed_size<decltype(type)>(out, in);
    });
}

extern "C" void fs_pack_weight(int64_t dtype, const void* weight, void* panels, int64_t out,
                               int64_t in, int64_t stride) {
    fastserve::with_type(dtype, [&](auto type) {
        using T = decltype(type);
        fastserve::pack((const T*)weight, (T*)panels, out, in, stride);
    });
}

// weight [out, in] of whole numbers from -127 to 127; the packed form has a byte for each element.
extern "C" void fs_pack_int8_weight(int64_t dtype, const void* weight, void* panels, int64_t out,
                                    int64_t in, int64_t stride) {
    fastserve::with_type(dtype, [&](auto type) {
        using T = decltype(type);
        fastserve::pack_int8<T>((const int8_t*)weight, (int8_t*)panels, out, in, stride);
    });
}

namespace fastserve {

static void linear_any(const Team* team, int64_t dtype, const void* x, const void* panels,
                       const void* bias, void* y, int64_t rows, int64_t in, int64_t out,
                       int64_t x_stride, int64_t relu) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        linear<SamePanels<T>>(team, (const T*)x, panels, (const T*)nullptr, (const T*)bias, (T*)y,
                              rows, in, out, x_stride, relu != 0);
    });
}

static void int8_linear_any(const Team* team, int64_t dtype, const void* x, const void* panels,
                            const void* scale, const void* bias, void* y, int64_t rows, int64_t in,
                            int64_t out, int64_t x_stride, int64_t relu) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        linear<Int8Panels<T>>(team, (const T*)x, panels, (const T*)scale, (const T*)bias, (T*)y,
                              rows, in, out, x_stride, relu != 0);
    });
}

// The panels of each group are a Pieces.
template <typename T>
static void linear_of_pieces(const Team* team, const std::vector<Group<T>>& groups,
                             const RowsOfX<T>& row_of_x, T* y, int64_t in, int64_t out, bool relu) {
    const auto pieces_of = [](const Group<T>& group) { return (const Pieces<T>*)group.panels; };
    std::vector<Group<T>> plain, others;
    std::vector<Group<T>> rounding[2];  // with few blocks of a scale, and with many
    int64_t most_panels = 0;
    for (const Group<T>& group : groups) {
        const Pieces<T>& pieces = *pieces_of(group);
        most_panels = std::max(most_panels, pieces.panels());
        if (round_rows(pieces))
            rounding[pieces.all([](const auto& piece) { return piece.has_groups_of(MANY_BLOCKS); })]
                .push_back(group);
        else (pieces.plain_panels() ? plain : others).push_back(group);
    }
#if defined(ROUNDS_ROWS)
    if constexpr (sizeof(T) < sizeof(float)) {
        size_t done = 0;
        const auto multiply = [&](auto blocks) {
            const auto& some = rounding[blocks == MANY_BLOCKS];
            if (some.empty()) return;
            if (done && team) team->barrier();  // the last product used the same memory
            linear<RoundingPanels<blocks>, T, RoundedProduct<blocks>>(
                team, some, row_of_x, y, in, out, most_panels, relu);
            done += some.size();
        };
        multiply(std::integral_constant<int, MANY_BLOCKS>());
        multiply(std::integral_constant<int, FEW_BLOCKS>());
        if (done == groups.size()) return;
        if (done && team) team->barrier();
    }
#endif
    if (others.empty()) {  // the usual case of experts without quantization
        for (Group<T>& group : plain) group.panels = pieces_of(group)->plain_panels();
        return linear<SamePanels<T>>(team, plain, row_of_x, y, in, out, most_panels, relu);
    }
    others.insert(others.end(), plain.begin(), plain.end());
    linear<QuantizedPanels<T>>(team, others, row_of_x, y, in, out, most_panels, relu);
}

// x [., in] -> y [., out]: rows from starts[g] up to starts[g + 1] of y, which has `y_rows`, have weight
// g, and are the rows of x that `rows` names, or, without it, those of the same numbers. Other rows of y
// stay as they are. pieces: of each weight `count`, one below the other. biases [groups, out] or null.
static void grouped_linear_any(const Team* team, int64_t dtype, const void* x, const int32_t* rows,
                               const int32_t* starts, const void* pieces, const void* biases,
                               void* y, [[maybe_unused]] int64_t y_rows, int64_t groups,
                               int64_t count, int64_t in, int64_t out, int64_t x_stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        std::vector<Pieces<T>> weights;
        weights.reserve(groups);  // groups refer to them
        const auto weight_of = [&](int64_t group) {
            weights.emplace_back((const StoredPiece*)pieces + group * count, count, in);
            return (const void*)&weights.back();
        };
        linear_of_pieces(
            team,
            groups_with_rows(groups, starts, weight_of, (const T*)nullptr, (const T*)biases, out),
            {(const T*)x, x_stride, rows}, (T*)y, in, out, false);
    });
}

// The same in INT8. panels: of all weights, one after the other; scales [groups, out].
static void grouped_int8_linear_any(const Team* team, int64_t dtype, const void* x,
                                    const int32_t* rows, const int32_t* starts, const void* panels,
                                    const void* scales, const void* biases, void* y,
                                    [[maybe_unused]] int64_t y_rows, int64_t groups, int64_t in,
                                    int64_t out, int64_t x_stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const auto panels_of_group = [&](int64_t group) {
            return (const int8_t*)panels + group * packed_size<T>(out, in);
        };
        linear<Int8Panels<T>>(team,
                              groups_with_rows(groups, starts, panels_of_group, (const T*)scales,
                                               (const T*)biases, out),
                              {(const T*)x, x_stride, rows}, (T*)y, in, out, panels_of(out), false);
    });
}

// pieces: `count` of them, one below the other.
static void quantized_linear_any(const Team* team, int64_t dtype, const void* x, const void* pieces,
                                 int64_t count, const void* bias, void* y, int64_t rows, int64_t in,
                                 int64_t x_stride, int64_t relu) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const Pieces<T> weight((const StoredPiece*)pieces, count, in);
        linear_of_pieces<T>(team, {{&weight, nullptr, (const T*)bias, 0, rows}},
                            {(const T*)x, x_stride, nullptr}, (T*)y, in, weight.out(), relu != 0);
    });
}

// Rows `ids` of the weight: y [ids, in]. `first` is the id of the first row; those of no row give zeros.
static void quantized_rows_any(const Team* team, int64_t dtype, const void* pieces, int64_t count,
                               const int64_t* ids, void* y, int64_t ids_count, int64_t in,
                               int64_t first) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        look_up_rows(team, Pieces<T>((const StoredPiece*)pieces, count, in), ids, ids_count, in,
                     first, (T*)y);
    });
}

}  // namespace fastserve

// The layout of a piece is in quantized_panels.h.
extern "C" int64_t fs_quantized_bytes(int64_t dtype, const void* piece, int64_t in) {
    using namespace fastserve;
    return with_type(dtype, [&](auto type) {
        const Piece<decltype(type)> packed(*(const StoredPiece*)piece, in);
        return packed.panels() * packed.panel_bytes();
    });
}

// codes [out, in] of bytes; numbers [out, groups] and their steps [out, superblocks], or null.
extern "C" void fs_pack_quantized(int64_t dtype, const void* piece, const void* codes,
                                  const void* scale, const void* scale_step, const void* offset,
                                  const void* offset_step, void* panels, int64_t in,
                                  int64_t stride) {
    using namespace fastserve;
    using Bytes = const uint8_t*;
    with_type(dtype, [&](auto type) {
        Piece<decltype(type)>(*(const StoredPiece*)piece, in)
            .pack({(Bytes)codes, stride, (Bytes)scale, (Bytes)scale_step, (Bytes)offset,
                   (Bytes)offset_step},
                  in, (uint8_t*)panels);
    });
}

// Whether products with these pieces round rows.
extern "C" int64_t fs_rounds_rows(int64_t dtype, const void* pieces, int64_t count, int64_t in) {
    using namespace fastserve;
    return with_type(dtype, [&](auto type) {
        return round_rows(Pieces<decltype(type)>((const StoredPiece*)pieces, count, in));
    });
}

OPERATION(fs_linear, linear_any)
OPERATION(fs_int8_linear, int8_linear_any)
OPERATION(fs_grouped_linear, grouped_linear_any)
OPERATION(fs_grouped_int8_linear, grouped_int8_linear_any)
OPERATION(fs_quantized_linear, quantized_linear_any)
OPERATION(fs_quantized_rows, quantized_rows_any)
