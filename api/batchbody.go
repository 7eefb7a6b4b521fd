package api

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"

	"github.com/klauspost/compress/zstd"

	"holdfast/store"
	"holdfast/workflows/task"
)

// bodyKind is the closed set of what can be wrong with a body as a whole.
type bodyKind uint8

const (
	bodyNotJSON bodyKind = iota + 1
	bodyNotAcceptable
	bodyTooSlow
	bodyUnsupported
)

// bodyError is what is wrong with a body outside its tasks.
type bodyError struct {
	kind     bodyKind
	location string
	message  string
	// offset is the byte of the decoded body, -1 if unknown.
	offset int64
	cause  error
}

// Error joins location and message.
func (e *bodyError) Error() string { return e.location + " " + e.message }

// bodyTooLargeError tells which bound a body has passed.
type bodyTooLargeError struct {
	location   string
	limitBytes int64
	// decoded: the bound on what the body decodes to, not on what is sent.
	decoded bool
}

// Error names the bound.
func (e *bodyTooLargeError) Error() string { return e.location + " " + e.message() }

func (e *bodyTooLargeError) message() string {
	if e.decoded {
		return fmt.Sprintf("is longer than %d bytes once decompressed", e.limitBytes)
	}
	return fmt.Sprintf("is longer than %d bytes", e.limitBytes)
}

// batchBody reads {"policy_version": n, "tasks": [...]} as a stream: one task is
// in memory at a time.
type batchBody struct {
	source  *boundedReader
	digest  hash.Hash
	decoder *json.Decoder
	close   func()

	policyVersion *int64
	hasVersion    bool
	tasks         int
	ended         bool
	taskBytes     int64
}

// newBatchBody begins to read a body that is sent in the given Content-Encoding.
// limits.BatchBytes holds for the bytes sent and for what they decode to.
func newBatchBody(sent io.Reader, contentEncoding string, limits *Limits) (*batchBody, error) {
	wireBytes := &boundedReader{from: sent, remaining: limits.BatchBytes, exceeded: &bodyTooLargeError{location: "body", limitBytes: limits.BatchBytes}}
	b := &batchBody{digest: sha256.New(), taskBytes: limits.TaskBytes, close: func() {}}
	var plain io.Reader = wireBytes
	switch strings.ToLower(strings.TrimSpace(contentEncoding)) {
	case "", "identity":
	case "gzip":
		unzip, err := gzip.NewReader(wireBytes)
		if err != nil {
			return nil, readingError(err, "body", 0)
		}
		plain = unzip
	case "zstd":
		unzip, err := zstd.NewReader(wireBytes, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstdWindowBytes))
		if err != nil {
			return nil, readingError(err, "body", 0)
		}
		plain, b.close = unzip, unzip.Close
	default:
		return nil, &bodyError{kind: bodyUnsupported, location: "header.Content-Encoding", message: fmt.Sprintf("must be gzip, zstd or identity, is %q", shorten(contentEncoding)), offset: -1}
	}
	b.source = &boundedReader{from: plain, remaining: limits.BatchBytes, exceeded: &bodyTooLargeError{location: "body", limitBytes: limits.BatchBytes, decoded: plain != io.Reader(wireBytes)}}
	b.decoder = json.NewDecoder(io.TeeReader(b.source, b.digest))
	b.decoder.UseNumber()
	return b, nil
}

// maxZstdWindowBytes bounds the memory that a sender can make a decoder take.
const maxZstdWindowBytes = 8 << 20

// open reads up to the first task.
func (b *batchBody) open() error {
	if err := b.delimiter('{', "body", "must be an object"); err != nil {
		return err
	}
	return b.members(false)
}

// members reads members of the body until the tasks begin, or, after them, until
// the body ends.
func (b *batchBody) members(afterTasks bool) error {
	for b.decoder.More() {
		token, err := b.decoder.Token()
		if err != nil {
			return b.reading(err, "body")
		}
		name, _ := token.(string)
		location := "body." + shorten(name)
		switch {
		case name == "policy_version" && afterTasks && !b.hasVersion:
			return b.notAcceptable(location, "must stand before tasks, since the tasks are released at it as they arrive")
		case name == "policy_version" && !b.hasVersion:
			if err := b.version(); err != nil {
				return err
			}
		case name == "tasks" && !afterTasks:
			return b.delimiter('[', location, "must be an array")
		case name == "policy_version", name == "tasks":
			return b.notAcceptable(location, "occurs twice")
		default:
			return b.notAcceptable(location, "is not a known field; a batch has policy_version and tasks")
		}
	}
	if _, err := b.decoder.Token(); err != nil {
		return b.reading(err, "body")
	}
	if !afterTasks {
		return b.notAcceptable("body.tasks", "is required")
	}
	return b.nothingFollows()
}

func (b *batchBody) version() error {
	const location = "body.policy_version"
	b.hasVersion = true
	var given any
	if err := b.decoder.Decode(&given); err != nil {
		return b.reading(err, location)
	}
	if given == nil {
		return nil
	}
	number, ok := given.(json.Number)
	if !ok {
		return b.notAcceptable(location, "must be a whole number")
	}
	version, err := number.Int64()
	if err != nil || version < 0 {
		return b.notAcceptable(location, fmt.Sprintf("must be a whole number from 0, is %s", shorten(number.String())))
	}
	b.policyVersion = &version
	return nil
}

// next returns the next task, or io.EOF once the whole body has been read and
// found well-formed to its end.
func (b *batchBody) next() (*task.Spec, error) {
	if b.ended {
		return nil, io.EOF
	}
	path := fmt.Sprintf("tasks[%d]", b.tasks)
	// The decoder reads ahead, so the bound of a task is set on the bytes read.
	b.source.allow(b.decoder.InputOffset()+b.taskBytes, &bodyTooLargeError{location: "body." + path, limitBytes: b.taskBytes})
	defer b.source.allowAll()
	if !b.decoder.More() {
		if err := b.delimiter(']', "body.tasks", "must be an array of tasks"); err != nil {
			return nil, err
		}
		b.source.allowAll()
		b.ended = true
		if err := b.members(true); err != nil {
			return nil, err
		}
		return nil, io.EOF
	}
	if b.tasks == store.MaxBatchTasks {
		return nil, b.notAcceptable("body.tasks", fmt.Sprintf("holds more than %d tasks", store.MaxBatchTasks))
	}
	spec, err := task.DecodeNext(b.decoder, path)
	if err != nil {
		var field *task.FieldError
		if errors.As(err, &field) {
			return nil, err
		}
		return nil, b.reading(err, "body."+path)
	}
	b.tasks++
	return &spec, nil
}

// nothingFollows reads the rest, which may be white space only, so that the hash
// covers all bytes.
func (b *batchBody) nothingFollows() error {
	_, err := b.decoder.Token()
	if errors.Is(err, io.EOF) {
		return nil
	}
	var syntax *json.SyntaxError
	if err != nil && !errors.As(err, &syntax) {
		return b.reading(err, "body")
	}
	return &bodyError{kind: bodyNotJSON, location: "body", message: "goes on after the object ends", offset: b.decoder.InputOffset()}
}

// hash returns the SHA-256 of the decoded body.
func (b *batchBody) hash() []byte { return b.digest.Sum(nil) }

// delimiter reads one delimiter, or says what the place must hold.
func (b *batchBody) delimiter(want json.Delim, location, otherwise string) error {
	token, err := b.decoder.Token()
	if err != nil {
		return b.reading(err, location)
	}
	if got, ok := token.(json.Delim); !ok || got != want {
		return b.notAcceptable(location, otherwise)
	}
	return nil
}

func (b *batchBody) notAcceptable(location, message string) error {
	return &bodyError{kind: bodyNotAcceptable, location: location, message: message, offset: b.decoder.InputOffset()}
}

func (b *batchBody) reading(err error, location string) error {
	return readingError(err, location, b.decoder.InputOffset())
}

// readingError says why a body could not be read on.
func readingError(err error, location string, offset int64) error {
	var (
		syntax   *json.SyntaxError
		tooLarge *bodyTooLargeError
	)
	e := &bodyError{kind: bodyNotJSON, location: location, offset: offset, cause: err}
	switch {
	case errors.As(err, &tooLarge):
		return tooLarge
	case errors.As(err, &syntax):
		e.message, e.offset = "is not valid JSON: "+syntax.Error(), syntax.Offset
	case isTimeout(err):
		e.kind, e.message = bodyTooSlow, "stopped arriving"
	case errors.Is(err, io.EOF) && offset == 0:
		e.message = "is empty"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		e.message = "ends before the document does"
	case errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum), isZstd(err):
		e.message = "is not what its Content-Encoding says: " + err.Error()
	default:
		e.message = "could not be read: " + err.Error()
	}
	return e
}

// isZstd tells errors of the zstd decoder, which has no type of its own for them.
func isZstd(err error) bool {
	for _, known := range []error{zstd.ErrMagicMismatch, zstd.ErrCRCMismatch, zstd.ErrWindowSizeExceeded, zstd.ErrDecoderSizeExceeded, zstd.ErrReservedBlockType, zstd.ErrBlockTooSmall, zstd.ErrUnexpectedBlockSize, zstd.ErrCompressedSizeTooBig} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// boundedReader fails beyond a number of bytes instead of ending, so that a body
// that is too long is never taken for a shorter one.
type boundedReader struct {
	from      io.Reader
	remaining int64
	exceeded  *bodyTooLargeError
	// over: the bound was passed, and stays so.
	over bool
	// read counts bytes given out; until is a nearer bound on it for now.
	read       int64
	until      int64
	untilError *bodyTooLargeError
}

func (r *boundedReader) allow(until int64, otherwise *bodyTooLargeError) {
	r.until, r.untilError = until, otherwise
}

func (r *boundedReader) allowAll() { r.untilError = nil }

// Read gives out bytes within the bounds.
func (r *boundedReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if r.over {
		return 0, r.exceeded
	}
	if r.untilError != nil {
		if r.read >= r.until {
			return 0, r.untilError
		}
		p = p[:min(int64(len(p)), r.until-r.read)]
	}
	// One byte beyond the bound tells a body that ends there from a longer one.
	if int64(len(p)) > r.remaining+1 {
		p = p[:r.remaining+1]
	}
	n, err := r.from.Read(p)
	if int64(n) > r.remaining {
		r.read += r.remaining
		n, r.remaining, r.over = int(r.remaining), 0, true
		return n, r.exceeded
	}
	r.remaining -= int64(n)
	r.read += int64(n)
	return n, err
}
