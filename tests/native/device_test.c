/* The parts of device copies that no runtime is needed for: what is submitted, whose address is whose, what is readable. */
#include "check.h"
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static void check_copies(void)
{
    /* Three keys: two pieces that touch, one piece, two that do not touch. */
    struct ems_piece pieces[] = {{1000, 10}, {1010, 20}, {5000, 64}, {7000, 1}, {8000, 2}};
    uint64_t first[] = {0, 2, 3, 5}, lengths[] = {30, 64, 3};
    struct ems_spans spans = {3, first, lengths, pieces};
    struct ems_place places[3] = {{.offset = 4096}, {.offset = 0}, {.offset = 8192}};
    unsigned char *base = (unsigned char *)0x100000, mask[] = {1, 0, 1};
    struct ems_copies copies;

    CHECK(ems_copies_make(&copies, &spans, 0, 3, base, places, NULL, 0) == 0);
    CHECK(copies.count == 4 && copies.sizes[0] == 30 && copies.targets[0] == (void *)1000);
    CHECK(copies.sources[0] == base + 4096 && copies.sources[1] == base);
    CHECK(copies.sources[3] == base + 8193 && copies.targets[3] == (void *)8000);
    ems_copies_free(&copies);

    /* Staged: keys follow each other at multiples of 64; one that is masked out takes no room. */
    CHECK(ems_copies_make(&copies, &spans, 0, 3, base, NULL, mask, 1) == 0);
    CHECK(copies.count == 3 && copies.targets[0] == base && copies.sources[0] == (void *)1000);
    CHECK(copies.targets[1] == base + 64 && copies.targets[2] == base + 65);
    ems_copies_free(&copies);

    CHECK(ems_copies_make(&copies, &spans, 1, 1, base, NULL, NULL, 1) == 0);
    CHECK(copies.count == 1 && copies.sizes[0] == 64);
    ems_copies_free(&copies);
    CHECK(ems_copies_make(&copies, &spans, 3, 0, base, NULL, NULL, 1) == 0 && copies.count == 0);
    ems_copies_free(&copies);
}

static void check_atlas(void)
{
    struct ems_atlas atlas = {0};
    const uint64_t step = (uint64_t)1 << EMS_ATLAS_SHIFT;

    CHECK(ems_atlas_find(&atlas, 5 * step) == EMS_UNKNOWN);
    for (uint64_t n = 1; n <= 20000; n++)
        ems_atlas_note(&atlas, n * step + 77, (int)(n % 16));
    for (uint64_t n = 1; n <= 20000; n++)
        CHECK(ems_atlas_find(&atlas, n * step + step - 1) == (int)(n % 16));
    CHECK(ems_atlas_find(&atlas, 20001 * step) == EMS_UNKNOWN);
    ems_atlas_note(&atlas, 7 * step, 3);
    CHECK(ems_atlas_find(&atlas, 7 * step) == 3);
    ems_atlas_note(&atlas, 0, 1);
    CHECK(ems_atlas_find(&atlas, 0) == EMS_UNKNOWN);
    ems_atlas_clear(&atlas);
    CHECK(ems_atlas_find(&atlas, 7 * step) == EMS_UNKNOWN);
    /* More than it holds: it forgets, and goes on. */
    for (uint64_t n = 1; n <= 600000; n++)
        ems_atlas_note(&atlas, n * step, 1);
    ems_atlas_note(&atlas, step, 2);
    CHECK(ems_atlas_find(&atlas, step) == 2);
    ems_atlas_clear(&atlas);
}

static void check_readable(void)
{
    size_t page = 4096, npieces = 1500;
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ems_piece *pieces = malloc(npieces * sizeof *pieces);
    uint64_t first[2] = {0, npieces}, length = npieces;
    struct ems_spans spans = {1, first, &length, pieces};

    CHECK(memory != MAP_FAILED && mprotect(memory + page, page, PROT_NONE) == 0);
    for (size_t i = 0; i < npieces; i++)
        pieces[i] = (struct ems_piece){(uint64_t)(uintptr_t)memory + i, 1};
    CHECK(ems_first_unreadable(&spans) == SIZE_MAX);
    pieces[1300].nbytes = page; /* its last byte lies behind the page */
    CHECK(ems_first_unreadable(&spans) == 1300);
    pieces[513].address = 64;
    CHECK(ems_first_unreadable(&spans) == 513);
    pieces[0].address = (uint64_t)(uintptr_t)memory + page;
    CHECK(ems_first_unreadable(&spans) == 0);
    free(pieces);
    munmap(memory, 2 * page);
}

static void check_symbols(void)
{
    struct {
        size_t (*length)(const char *);
        void (*absent)(void);
    } calls;
    struct ems_symbol symbols[] = {{"strlen", 0, 0}, {"there_is_no_such_call", sizeof(void *), 1}};
    char error[200] = "";

    CHECK(ems_symbols_bind(&calls, symbols, 2, "libc.so.6", "a library", error, sizeof error) == 0);
    CHECK(calls.length("four") == 4 && !calls.absent);
    CHECK(strcmp(ems_symbols_missing(&calls, symbols, 2, 0), "there_is_no_such_call") == 0);
    CHECK(!ems_symbols_missing(&calls, symbols, 2, 1));
    symbols[1].optional = 0;
    CHECK(ems_symbols_bind(&calls, symbols, 2, "libc.so.6", "a library", error, sizeof error) == -1);
    CHECK(strcmp(error, "libc.so.6 has no there_is_no_such_call: too old, or not a library") == 0);
    CHECK(ems_symbols_bind(&calls, symbols, 2, "/nowhere.so", "a library", error, sizeof error) == -1);
    CHECK(strstr(error, "/nowhere.so"));
}

int main(void)
{
    check_symbols();
    check_copies();
    check_atlas();
    check_readable();
    puts("device: passed");
    return 0;
}
