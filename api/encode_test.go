package api

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	strictjson "github.com/go-json-experiment/json"
	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/store"
)

// longSample is a sample of n tokens, two thirds of them generated.
func longSample(n int) store.Sample {
	random := rand.New(rand.NewPCG(1, 2))
	tokens := &store.SampleTokens{TokenIDs: make([]int32, n), LossMask: make([]uint8, n), Logprobs: make([]float32, n)}
	for i := range n {
		tokens.TokenIDs[i] = random.Int32N(151_936)
		if i%3 != 0 {
			tokens.LossMask[i], tokens.Logprobs[i] = 1, -random.Float32()*5
		}
	}
	tokens.Segments = []store.Segment{{Kind: store.SegmentGenerated, Count: n}}
	return store.Sample{SessionID: uuid.New(), Status: router.Completed, Instances: []string{"one"}, ReleasedAt: time.Now(), EndedAt: time.Now(), Tokens: tokens}
}

func encodeSample(t testing.TB, sample store.Sample, encoding string) []byte {
	t.Helper()
	var out bytes.Buffer
	page := store.SamplePage{Samples: []store.Sample{sample}, Next: "next"}
	if err := writeSamples(bufio.NewWriterSize(&out, pageBufferBytes), &page, encoding); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestEncodingsAgree: both encodings carry the very same numbers, and a page is
// what encoding/json would make of it.
func TestEncodingsAgree(t *testing.T) {
	sample := longSample(1000)
	for _, encoding := range []string{encodingJSON, encodingPacked} {
		var page wire.SamplePage
		if err := json.Unmarshal(encodeSample(t, sample, encoding), &page); err != nil {
			t.Fatal(err)
		}
		if len(page.Samples) != 1 || page.Next != "next" || page.More {
			t.Fatalf("%s: %d samples, next %q", encoding, len(page.Samples), page.Next)
		}
		ids, mask, logprobs, err := page.Samples[0].Arrays()
		if err != nil {
			t.Fatal(err)
		}
		for i := range sample.Tokens.TokenIDs {
			if ids[i] != sample.Tokens.TokenIDs[i] || mask[i] != sample.Tokens.LossMask[i] || logprobs[i] != sample.Tokens.Logprobs[i] {
				t.Fatalf("%s: token %d is %d, %d, %v", encoding, i, ids[i], mask[i], logprobs[i])
			}
		}
	}
	broken := wire.Pack([]int32{1, 2}, []uint8{0, 1}, []float32{0, -1})
	broken.Logprobs = broken.Logprobs[:4]
	if _, _, _, err := broken.Unpack(); err == nil {
		t.Error("arrays of unequal length were accepted")
	}
}

const longSampleTokens = 128 << 10

// reportCPU adds processor time to a benchmark: on a busy machine the clock
// measures the others.
func reportCPU(b *testing.B) {
	used := func() float64 {
		var usage syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
			b.Fatal(err)
		}
		return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e6
	}
	begin := used()
	b.Cleanup(func() { b.ReportMetric((used()-begin)/float64(b.N), "cpu-ms/op") })
}

// BenchmarkEncodeSample writes a page of one sample of 128K tokens.
func BenchmarkEncodeSample(b *testing.B) {
	for _, encoding := range []string{encodingJSON, encodingPacked} {
		b.Run(encoding, func(b *testing.B) {
			sample := longSample(longSampleTokens)
			b.ReportAllocs()
			reportCPU(b)
			size := 0
			for b.Loop() {
				size = len(encodeSample(b, sample, encoding))
			}
			b.ReportMetric(float64(size), "bytes")
		})
	}
}

// BenchmarkDecodeSample reads such a page back into arrays, with the client's
// decoder and with the standard library's.
func BenchmarkDecodeSample(b *testing.B) {
	for name, decode := range map[string]func([]byte, any) error{
		"client": func(text []byte, v any) error { return strictjson.Unmarshal(text, v) }, "encoding-json": json.Unmarshal,
	} {
		for _, encoding := range []string{encodingJSON, encodingPacked} {
			b.Run(fmt.Sprintf("%s/%s", encoding, name), func(b *testing.B) {
				text := encodeSample(b, longSample(longSampleTokens), encoding)
				b.ReportAllocs()
				reportCPU(b)
				for b.Loop() {
					var page wire.SamplePage
					if err := decode(text, &page); err != nil {
						b.Fatal(err)
					}
					if ids, _, _, err := page.Samples[0].Arrays(); err != nil || len(ids) != longSampleTokens {
						b.Fatal(len(ids), err)
					}
				}
			})
		}
	}
}
