package trace

import (
	"bufio"
	"bytes"
	"errors"
	"io"

	strictjson "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// maxRecordBytes bounds one line, one CSV record and one JSON trajectory, and
// with it what a reader holds of a file's text at one time. The longest line of
// the public traces has 140 kB.
const maxRecordBytes = 64 << 20

// maxRows bounds the rows of one file, since readers that must sort or link
// rows keep some 50 bytes of numbers for each.
const maxRows = 4 << 20

// line is one line of a file.
type line struct {
	number int
	// offset is where the line starts in the file.
	offset int64
	text   []byte
}

// eachLine calls do for every line that is not blank. The text is valid only
// during the call.
func eachLine(name string, r io.Reader, do func(line) error) error {
	reader := bufio.NewReaderSize(r, 1<<16)
	var text []byte
	var offset int64
	for number := 1; ; number++ {
		text = text[:0]
		var readErr error
		for {
			part, err := reader.ReadSlice('\n')
			text = append(text, part...)
			if len(text) > maxRecordBytes {
				return fileErrorf(name, number, "", "line is longer than %d bytes", maxRecordBytes)
			}
			if !errors.Is(err, bufio.ErrBufferFull) {
				readErr = err
				break
			}
		}
		if readErr != nil && !errors.Is(readErr, io.EOF) {
			return fileErrorf(name, number, "", "cannot be read: %v", readErr)
		}
		if number > maxRows {
			return fileErrorf(name, number, "", "file has more than %d lines", maxRows)
		}
		if len(bytes.TrimSpace(text)) > 0 {
			if err := do(line{number: number, offset: offset, text: text}); err != nil {
				return err
			}
		}
		offset += int64(len(text))
		if readErr != nil {
			return nil
		}
	}
}

// decodeLine decodes one line of JSON. Members that the format has beside the
// wanted ones are ignored; text need not be valid UTF-8, since it is only
// counted.
func decodeLine(name string, l line, into any) error {
	err := strictjson.Unmarshal(bytes.TrimRight(l.text, "\r\n"), into, jsontext.AllowInvalidUTF8(true))
	if err != nil {
		return jsonFileError(name, l.number, "", err, 0)
	}
	return nil
}

// windowReader fails when more than maxRecordBytes are read without a reset:
// it keeps a decoder from buffering one endless record.
type windowReader struct {
	r    io.Reader
	used int
}

var errRecordTooLong = errors.New("one record is longer than 67108864 bytes")

func (w *windowReader) Read(p []byte) (int, error) {
	if w.used > maxRecordBytes {
		return 0, errRecordTooLong
	}
	n, err := w.r.Read(p)
	w.used += n
	return n, err
}

func (w *windowReader) reset() { w.used = 0 }
