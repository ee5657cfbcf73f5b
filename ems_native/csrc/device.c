/* The parts of device copies that do not depend on the vendor. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

int ems_symbols_bind(void *calls, const struct ems_symbol *symbols, size_t count, const char *path,
                     const char *what, char *error, size_t nerror)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        snprintf(error, nerror, "%s", dlerror());
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        void *found = dlsym(library, symbols[i].name);

        if (!found && !symbols[i].optional) {
            snprintf(error, nerror, "%s has no %s: too old, or not %s", path, symbols[i].name, what);
            return -1;
        }
        memcpy((char *)calls + symbols[i].offset, &found, sizeof found);
    }
    return 0;
}

const char *ems_symbols_missing(const void *calls, const struct ems_symbol *symbols, size_t count,
                                size_t n)
{
    for (size_t i = 0; i < count; i++) {
        void *there;

        memcpy(&there, (const char *)calls + symbols[i].offset, sizeof there);
        if (!there && n-- == 0)
            return symbols[i].name;
    }
    return NULL;
}

static size_t count_pieces(const struct ems_spans *spans, size_t first, size_t count,
                           const unsigned char *mask)
{
    size_t pieces = 0;

    for (size_t key = first; key < first + count; key++)
        if (!mask || mask[key])
            pieces += spans->first[key + 1] - spans->first[key];
    return pieces;
}

static void append(struct ems_copies *copies, unsigned char *host, const struct ems_piece *piece,
                   int to_host)
{
    unsigned char *device = (unsigned char *)(uintptr_t)piece->address;
    unsigned char *target = to_host ? host : device, *source = to_host ? device : host;
    size_t last = copies->count;

    if (last && (unsigned char *)copies->targets[last - 1] + copies->sizes[last - 1] == target &&
        (unsigned char *)copies->sources[last - 1] + copies->sizes[last - 1] == source) {
        copies->sizes[last - 1] += piece->nbytes;
        return;
    }
    copies->targets[last] = target;
    copies->sources[last] = source;
    copies->sizes[last] = piece->nbytes;
    copies->count++;
}

int ems_copies_make(struct ems_copies *copies, const struct ems_spans *spans, size_t first,
                    size_t count, unsigned char *base, const struct ems_place *places,
                    const unsigned char *mask, int to_host)
{
    size_t pieces = count_pieces(spans, first, count, mask);
    uint64_t staged = 0;

    copies->count = 0;
    copies->targets = malloc((pieces + 1) * (2 * sizeof(void *) + sizeof(size_t)));
    if (!copies->targets)
        return -1;
    copies->sources = copies->targets + pieces + 1;
    copies->sizes = (size_t *)(copies->sources + pieces + 1);
    for (size_t key = first; key < first + count; key++) {
        uint64_t done = 0;

        if (mask && !mask[key])
            continue;
        for (uint64_t i = spans->first[key]; i < spans->first[key + 1]; i++) {
            append(copies, base + (places ? places[key].offset : staged) + done, spans->pieces + i,
                   to_host);
            done += spans->pieces[i].nbytes;
        }
        staged += (done + EMS_STAGING_ALIGNMENT - 1) / EMS_STAGING_ALIGNMENT * EMS_STAGING_ALIGNMENT;
    }
    return 0;
}

void ems_copies_free(struct ems_copies *copies)
{
    free(copies->targets);
}

/* ---- atlas: open addressing, never more than half full ---- */

#define ATLAS_FIRST ((size_t)64)
#define ATLAS_MOST ((size_t)1 << 20)

static size_t slot_of(const struct ems_atlas *atlas, uint64_t block)
{
    size_t slot = (size_t)(block * UINT64_C(0x9E3779B97F4A7C15) >> 20) & (atlas->size - 1);

    while (atlas->blocks[slot] && atlas->blocks[slot] != block)
        slot = (slot + 1) & (atlas->size - 1);
    return slot;
}

int ems_atlas_find(const struct ems_atlas *atlas, uint64_t address)
{
    uint64_t block = address >> EMS_ATLAS_SHIFT;
    size_t slot;

    if (!atlas->size || !block)
        return EMS_UNKNOWN;
    slot = slot_of(atlas, block);
    return atlas->blocks[slot] ? atlas->devices[slot] : EMS_UNKNOWN;
}

static int grow(struct ems_atlas *atlas)
{
    struct ems_atlas old = *atlas;
    size_t size = old.size ? 2 * old.size : ATLAS_FIRST;

    if (size > ATLAS_MOST)
        return 0;
    atlas->blocks = calloc(size, sizeof *atlas->blocks);
    atlas->devices = malloc(size * sizeof *atlas->devices);
    if (!atlas->blocks || !atlas->devices) {
        free(atlas->blocks);
        free(atlas->devices);
        *atlas = old;
        return 0;
    }
    atlas->size = size;
    for (size_t i = 0; i < old.size; i++) {
        if (old.blocks[i]) {
            size_t slot = slot_of(atlas, old.blocks[i]);

            atlas->blocks[slot] = old.blocks[i];
            atlas->devices[slot] = old.devices[i];
        }
    }
    free(old.blocks);
    free(old.devices);
    return 1;
}

void ems_atlas_note(struct ems_atlas *atlas, uint64_t address, int device)
{
    uint64_t block = address >> EMS_ATLAS_SHIFT;
    size_t slot;

    if (!block)
        return;
    if (2 * (atlas->used + 1) > atlas->size && !grow(atlas)) {
        ems_atlas_clear(atlas);
        return;
    }
    slot = slot_of(atlas, block);
    atlas->used += atlas->blocks[slot] == 0;
    atlas->blocks[slot] = block;
    atlas->devices[slot] = device;
}

void ems_atlas_clear(struct ems_atlas *atlas)
{
    free(atlas->blocks);
    free(atlas->devices);
    *atlas = (struct ems_atlas){0};
}

/* ---- memory of nobody ---- */

#define PIECES_ASKED ((size_t)512)

size_t ems_first_unreadable(const struct ems_spans *spans)
{
    struct iovec there[2 * PIECES_ASKED];
    char bytes[2 * PIECES_ASKED];
    size_t pieces = spans->first[spans->nkeys];

    for (size_t at = 0; at < pieces; at += PIECES_ASKED) {
        size_t count = pieces - at < PIECES_ASKED ? pieces - at : PIECES_ASKED;
        struct iovec here = {bytes, 2 * count};
        ssize_t got;

        for (size_t i = 0; i < count; i++) {
            const struct ems_piece *piece = spans->pieces + at + i;

            there[2 * i] = (struct iovec){(void *)(uintptr_t)piece->address, 1};
            there[2 * i + 1] = (struct iovec){(void *)(uintptr_t)(piece->address + piece->nbytes - 1), 1};
        }
        got = process_vm_readv(getpid(), &here, 1, there, 2 * count, 0);
        if (got < 0 && errno != EFAULT)
            return SIZE_MAX; /* not allowed here: nobody can tell */
        if (got < 0 || (size_t)got < 2 * count)
            return at + (got < 0 ? 0 : (size_t)got / 2);
    }
    return SIZE_MAX;
}
