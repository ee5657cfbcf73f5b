/* Keyed BLAKE2b against published vectors, fed in every possible cut. */
#include <stdio.h>
#include <string.h>

#include "blake2b.h"

struct vector {
    size_t nbytes; /* of the message 00 01 02 ... */
    const char *digest;
};

/* From the reference implementation's known answers: key 00 01 ... 3f, 64 bytes of digest. */
static const struct vector vectors[] = {
    {0, "10ebb67700b1868efb4417987acf4690ae9d972fb7a590c2f02871799aaa4786"
        "b5e996e8f0f4eb981fc214b005f42d2ff4233499391653df7aefcbc13fc51568"},
    {255, "142709d62e28fcccd0af97fad0f8465b971e82201dc51070faa0372aa43e9248"
          "4be1c1e73ba10906d5d1853db6a4106e0a7bf9800d373d6dee2d46d62ef2a461"},
};

int main(void)
{
    unsigned char key[64], message[255], digest[64];
    int failed = 0;

    for (size_t i = 0; i < sizeof message; i++)
        message[i] = (unsigned char)i;
    memcpy(key, message, sizeof key);
    for (size_t v = 0; v < sizeof vectors / sizeof *vectors; v++) {
        for (size_t cut = 0; cut <= vectors[v].nbytes; cut++) {
            struct ems_blake2b state;
            char text[2 * sizeof digest + 1];

            ems_blake2b_start(&state, key, sizeof key, sizeof digest);
            ems_blake2b_update(&state, message, cut);
            ems_blake2b_update(&state, message + cut, vectors[v].nbytes - cut);
            ems_blake2b_finish(&state, digest, sizeof digest);
            for (size_t i = 0; i < sizeof digest; i++)
                snprintf(text + 2 * i, 3, "%02x", digest[i]);
            if (strcmp(text, vectors[v].digest) != 0) {
                fprintf(stderr, "%zu bytes cut at %zu: %s\n", vectors[v].nbytes, cut, text);
                failed = 1;
            }
        }
    }
    if (!failed)
        puts("blake2b: all vectors hold");
    return failed;
}
