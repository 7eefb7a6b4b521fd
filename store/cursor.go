package store

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/google/uuid"
)

// Cursor is an opaque place in the samples of one run, in one of their orders:
// that of completion, or that of whole groups ("grouped").
type Cursor string

// A cursor is 8 bytes of sequence number and a checksum over run, number and order,
// so that a cursor of another run or order, or a mistyped one, is noticed.
const cursorBytes = 8 + 4

func cursorOf(runID uuid.UUID, grouped bool, seq int64) Cursor {
	var raw [cursorBytes]byte
	binary.BigEndian.PutUint64(raw[:8], uint64(seq))
	binary.BigEndian.PutUint32(raw[8:], cursorSum(runID, grouped, raw[:8]))
	return Cursor(base64.RawURLEncoding.EncodeToString(raw[:]))
}

func (c Cursor) seq(runID uuid.UUID, grouped bool) (int64, error) {
	raw, err := base64.RawURLEncoding.Strict().DecodeString(string(c))
	if err != nil || len(raw) != cursorBytes || binary.BigEndian.Uint32(raw[8:]) != cursorSum(runID, grouped, raw[:8]) {
		return 0, fmt.Errorf("cursor %q of run %s: %w", cleanText(string(c)), runID, ErrUnknownCursor)
	}
	return int64(binary.BigEndian.Uint64(raw[:8])), nil
}

func cursorSum(runID uuid.UUID, grouped bool, seq []byte) uint32 {
	sum := crc32.Update(crc32.ChecksumIEEE(runID[:]), crc32.IEEETable, seq)
	if grouped {
		sum = crc32.Update(sum, crc32.IEEETable, []byte("grouped"))
	}
	return sum
}
