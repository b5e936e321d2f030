// The code book of a type: CODE_BOOK_WORDS words, which begin at `code_book` of the push constants. Where all lanes fill it
// first, kernels read a copy in shared memory.
#ifdef SHARED_CODE_BOOK
#define HAS_CODE_BOOK
shared uint book_words[CODE_BOOK_WORDS];

void fill_code_book() {
    for (uint i = gl_LocalInvocationIndex; i < CODE_BOOK_WORDS; i += gl_WorkGroupSize.x)
        book_words[i] = load_word(address_add(to_address(code_book), i * 4u));
    barrier();
}

uint code_book_word(uint i) { return book_words[i]; }
#else
uint code_book_word(uint i) { return load_word(address_add(to_address(code_book), i * 4u)); }
#endif

// An entry of 16 bits: the first of two is in the lower half of a word.
uint code_book_half(uint i) { return code_book_word(i >> 1u) >> ((i & 1u) * 16u); }
