package simulated

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"holdfast/orchestrator/engine"
)

func TestTextIsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		piece := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{" 42", " 007", " 1000", " ba", " jude", " zuzuzu", " zuzuzuzuzu", "  ", "\n"}))
		text := ""
		for _, p := range rapid.SliceOf(piece).Draw(t, "text") {
			text += p
		}
		tokens := tokenize(nil, text, 151_936)
		for _, token := range tokens {
			if token < 0 || token >= 151_936 {
				t.Fatalf("%q holds token %d", text, token)
			}
		}
		if back := detokenize(tokens); back != text {
			t.Fatalf("%q came back as %q", text, back)
		}
		var asJSON []byte
		for _, token := range tokens {
			asJSON = appendWord(asJSON, token)
		}
		if quoted := append(append([]byte{'"'}, asJSON...), '"'); !json.Valid(quoted) {
			t.Fatalf("%q as JSON is %s", text, quoted)
		}
	})
}

func TestWordsAndNumbersAreTokens(t *testing.T) {
	for _, token := range []int32{numberBase, numberBase + 7, wordBase - 1, wordBase, 20_000, 151_935} {
		if got := tokenize(nil, detokenize([]int32{token}), 151_936); !slices.Equal(got, []int32{token}) {
			t.Errorf("token %d, which is %q, came back as %v", token, detokenize([]int32{token}), got)
		}
	}
	// A word beyond the vocabulary is bytes.
	if got := tokenize(nil, detokenize([]int32{20_000}), 2_000); len(got) < 2 {
		t.Errorf("a word that the vocabulary does not hold is %v", got)
	}
}

func TestClientsTokenize(t *testing.T) {
	messages := json.RawMessage(`[{"role":"user","content":"What is 17 + 25?"}]`)
	for _, kind := range []string{"vllm", "sglang", "openai"} {
		t.Run(kind, func(t *testing.T) {
			dialect := VLLM
			if kind == "sglang" {
				dialect = SGLang
			}
			server := httptest.NewServer(newTestServer(t, Config{TimeScale: 1e5, Dialect: dialect}).Handler())
			defer server.Close()
			client, err := engine.NewClient(kind, server.URL)
			if err != nil {
				t.Fatal(err)
			}
			breaker, err := engine.NewBreaker(client, engine.BreakerConfig{})
			if err != nil {
				t.Fatal(err)
			}
			tokenizer, ok := engine.TokenizerOf(breaker)
			if !ok {
				t.Fatal("the client does not tokenise")
			}
			ids, err := tokenizer.Tokenize(t.Context(), engine.TokenizeRequest{Text: "it is 42"})
			if err != nil {
				t.Fatal(err)
			}
			text, err := tokenizer.Detokenize(t.Context(), ids, false)
			if err != nil || text != "it is 42" {
				t.Fatalf("came back as %q, %v", text, err)
			}
			ended, err := tokenizer.Detokenize(t.Context(), ids, true)
			want := "it is"
			if kind == "openai" {
				want = text // the codec's ids hold no end
			}
			if err != nil || ended != want {
				t.Fatalf("without its end it is %q, %v", ended, err)
			}
			if empty, err := tokenizer.Detokenize(t.Context(), nil, true); err != nil || empty != "" {
				t.Fatalf("nothing is %q, %v", empty, err)
			}
			chat, err := tokenizer.Tokenize(t.Context(), engine.TokenizeRequest{Messages: messages, AddGenerationPrompt: true})
			var engineErr *engine.Error
			if kind != "vllm" {
				if !errors.As(err, &engineErr) || engineErr.Class != engine.FailTurn {
					t.Fatalf("a chat gave %v, %v", chat, err)
				}
				return
			}
			if err != nil || detokenize(chat) != "<user> What is 17 + 25?\n<assistant>" {
				t.Fatalf("a chat is %q, %v", detokenize(chat), err)
			}
			closed, err := tokenizer.Tokenize(t.Context(), engine.TokenizeRequest{Messages: messages})
			if err != nil || detokenize(closed) != "<user> What is 17 + 25?\n" {
				t.Fatalf("a chat without the answer's beginning is %q, %v", detokenize(closed), err)
			}
			if _, err := tokenizer.Detokenize(t.Context(), []int32{1 << 30}, false); !errors.As(err, &engineErr) || engineErr.Class != engine.FailTurn {
				t.Fatalf("an id beyond the vocabulary got %v", err)
			}
		})
	}
}

func TestEngineWithoutTokenizerSaysSo(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	client, err := engine.NewSGLang(engine.SGLangConfig{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	var engineErr *engine.Error
	if _, err := client.Tokenize(t.Context(), engine.TokenizeRequest{Text: "x"}); !errors.As(err, &engineErr) || engineErr.Class != engine.FailTurn || engineErr.StatusCode != 404 {
		t.Errorf("got %v", err)
	}
}
