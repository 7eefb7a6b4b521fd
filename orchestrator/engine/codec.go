package engine

import (
	"fmt"
	"unicode/utf8"
)

// TextCodec stands between the token ids of a session and a server that takes
// and gives text only. Whatever text a server gives must encode, and decode to the
// same text again; the ids need not be those that the server sampled.
type TextCodec interface {
	// Decode is the text that ids stand for, or an error if they are not text.
	Decode(ids []int32) (string, error)
	// Encode appends the ids of a text.
	Encode(ids []int32, text string) []int32
}

// Bytes is the codec whose ids are the bytes of the text in UTF-8, 0 to 255. It
// serves any model; for a model with a byte vocabulary its ids are the model's own.
type Bytes struct{}

// Decode implements TextCodec.
func (Bytes) Decode(ids []int32) (string, error) {
	text := make([]byte, len(ids))
	for i, id := range ids {
		if id < 0 || id > 255 {
			return "", fmt.Errorf("token %d at position %d is no byte: a server that takes text gets sessions whose ids are the bytes of UTF-8", id, i)
		}
		text[i] = byte(id)
	}
	if !utf8.Valid(text) {
		return "", fmt.Errorf("the %d ids are the bytes of no valid UTF-8", len(ids))
	}
	return string(text), nil
}

// Encode implements TextCodec.
func (Bytes) Encode(ids []int32, text string) []int32 {
	for i := range len(text) {
		ids = append(ids, int32(text[i]))
	}
	return ids
}
