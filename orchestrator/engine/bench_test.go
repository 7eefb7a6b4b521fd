package engine_test

import (
	"syscall"
	"testing"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/router/sim/instance"
)

// cpuSeconds is the process's own time, which counts on a busy machine.
func cpuSeconds(b *testing.B) float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

// BenchmarkAgentTurn is a turn with a prompt of 38,000 tokens, all but the last
// hundred cached, and 148 tokens of output: client and simulated engine together.
func BenchmarkAgentTurn(b *testing.B) {
	_, client := startEngine(b, simulated.Config{Engine: instance.QwenLike(), TimeScale: 1e5})
	prompt := tokens(38_000, 1)
	b.ReportAllocs()
	cpu := cpuSeconds(b)
	for b.Loop() {
		for i := range 100 {
			prompt[len(prompt)-1-i]++
		}
		if _, err := client.Generate(b.Context(), request(prompt, 148), nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric((cpuSeconds(b)-cpu)*1e6/float64(b.N), "cpu-us/turn")
}

// BenchmarkLongOutput is an output of 131,000 tokens with log-probabilities:
// client and simulated engine together.
func BenchmarkLongOutput(b *testing.B) {
	const output = 131_000
	_, client := startEngine(b, simulated.Config{Engine: instance.QwenLike(), TimeScale: 1e5})
	b.ReportAllocs()
	cpu := cpuSeconds(b)
	for b.Loop() {
		if _, err := client.Generate(b.Context(), request(tokens(50, 1), output), nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric((cpuSeconds(b)-cpu)*1e9/float64(b.N)/output, "cpu-ns/token")
}

// BenchmarkHundredStreams is the engine side of a demo: a hundred long outputs
// at once at sixty times real speed. It reports CPU seconds per wall second.
func BenchmarkHundredStreams(b *testing.B) {
	p := instance.QwenLike()
	for b.Loop() {
		server, client := startEngine(b, simulated.Config{Engine: p, TimeScale: 60})
		cpu := cpuSeconds(b)
		before := server.Stats().GeneratedTokens
		ended := make(chan error)
		for i := range 100 {
			go func() {
				_, err := client.Generate(b.Context(), request(tokens(156, i), 5_000), nil)
				ended <- err
			}()
		}
		for range 100 {
			if err := <-ended; err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric((cpuSeconds(b)-cpu)*1e9/float64(server.Stats().GeneratedTokens-before), "cpu-ns/token")
		b.ReportMetric((cpuSeconds(b)-cpu)/b.Elapsed().Seconds(), "cpus")
	}
}

// BenchmarkSGLangLongOutput is an output of 131,000 tokens with log-probabilities from
// SGLang: each event with what is new, or with everything so far.
func BenchmarkSGLangLongOutput(b *testing.B) {
	const output = 131_000
	for name, incremental := range map[string]bool{"incremental": true, "repeating": false} {
		b.Run(name, func(b *testing.B) {
			server, _ := startEngine(b, simulated.Config{Engine: instance.QwenLike(), TimeScale: 2000, Dialect: simulated.SGLang, IncrementalStream: incremental})
			client, err := engine.NewClient("sglang", server.URL())
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			cpu := cpuSeconds(b)
			for b.Loop() {
				if _, err := client.Generate(b.Context(), request(tokens(50, 1), output), nil); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((cpuSeconds(b)-cpu)*1e9/float64(b.N)/output, "cpu-ns/token")
		})
	}
}
