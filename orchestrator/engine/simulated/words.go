package simulated

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The vocabulary is a toy, in which every text can be written and read back: ids
// below numberBase are the bytes of UTF-8, those from numberBase on are the numbers
// 0 to 999 after a space, and all others are short pronounceable words after a
// space. Text is cut where a number or word of its own stands, and is bytes
// elsewhere, so that the ids of ordinary text are about as many as its bytes. No
// id is special: there is no beginning and no end of a sequence. A vocabulary too
// small for this folds all ids into itself, and then text cannot be read back.
const (
	numberBase = 256
	wordBase   = numberBase + 1000

	consonants, vowels = "bdfgjklmnprstvz", "aeiou"
	syllables          = len(consonants) * len(vowels)
)

// appendWord appends a token's text as it may stand in a JSON string. A byte that is
// no text by itself appears as the replacement character, as from real engines; see
// detokenize for the bytes.
func appendWord(buf []byte, token int32) []byte {
	if token >= numberBase {
		return appendText(buf, token)
	}
	switch {
	case token >= utf8.RuneSelf:
		return append(buf, "\ufffd"...)
	case token < ' ' || token == '"' || token == '\\' || token == 0x7f:
		const hex = "0123456789abcdef"
		return append(buf, '\\', 'u', '0', '0', hex[token>>4], hex[token&15])
	}
	return append(buf, byte(token))
}

// appendText appends what a token stands for.
func appendText(buf []byte, token int32) []byte {
	switch {
	case token < numberBase:
		return append(buf, byte(token))
	case token < wordBase:
		return strconv.AppendInt(append(buf, ' '), int64(token-numberBase), 10)
	}
	buf = append(buf, ' ')
	for t := int(token); ; t /= syllables {
		buf = append(buf, consonants[t%len(consonants)], vowels[t/len(consonants)%len(vowels)])
		if t < syllables {
			return buf
		}
	}
}

// detokenize is the text of tokens; bytes that are no text are replaced.
func detokenize(tokens []int32) string {
	buf := make([]byte, 0, 8*len(tokens))
	for _, token := range tokens {
		buf = appendText(buf, token)
	}
	return strings.ToValidUTF8(string(buf), "\ufffd")
}

// tokenize turns text into token ids, of which detokenize gives the same text again
// if it is valid UTF-8 and the vocabulary is large enough.
func tokenize(dst []int32, text string, vocabulary int) []int32 {
	for start := 0; start < len(text); {
		token, length := int32(text[start]), 1
		if text[start] == ' ' {
			end := start + 1
			for end < len(text) && isWordByte(text[end]) {
				end++
			}
			if id, ok := wordOf(text[start:end]); ok && int(id) < vocabulary {
				token, length = id, end-start
			}
		}
		dst = append(dst, int32(int(token)%vocabulary))
		start += length
	}
	return dst
}

func isWordByte(b byte) bool { return b >= '0' && b <= '9' || b >= 'a' && b <= 'z' }

// wordOf is the token beyond the bytes whose text is word.
func wordOf(word string) (token int32, ok bool) {
	const maxWordBytes = 11 // a space and five syllables, of which ids have no more
	if len(word) < 2 || len(word) > maxWordBytes {
		return 0, false
	}
	if n, err := strconv.ParseUint(word[1:], 10, 16); err == nil {
		token = numberBase + int32(min(n, wordBase))
	} else {
		id := 0
		for end := len(word); end > 2; end -= 2 {
			consonant, vowel := strings.IndexByte(consonants, word[end-2]), strings.IndexByte(vowels, word[end-1])
			if consonant < 0 || vowel < 0 {
				return 0, false
			}
			id = id*syllables + vowel*len(consonants) + consonant
		}
		if id > 1<<30 {
			return 0, false
		}
		token = int32(id)
	}
	// Not every spelling is the token's own: 007, a number of four digits, a word
	// whose id is a byte's.
	return token, token >= numberBase && string(appendText(nil, token)) == word
}

// tokenizeVLLM serves POST /tokenize {model, prompt | messages, add_generation_prompt, tools}.
func (s *Server) tokenizeVLLM(_ *life, w http.ResponseWriter, r *http.Request) {
	var body struct {
		Prompt              *string       `json:"prompt"`
		Messages            []chatMessage `json:"messages"`
		AddGenerationPrompt *bool         `json:"add_generation_prompt"`
		// Tools stand before the messages, as in the templates of real models.
		Tools []json.RawMessage `json:"tools"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, s.cfg.MaxBodyBytes)).Decode(&body); err != nil {
		s.writeError(w, badRequest("", "%v", err))
		return
	}
	var text string
	switch {
	case body.Messages != nil:
		// As in vLLM, the answer's beginning is there unless it is declined.
		for _, tool := range body.Tools {
			text += "<tool> " + string(tool) + "\n"
		}
		text += chatText(body.Messages, body.AddGenerationPrompt == nil || *body.AddGenerationPrompt)
	case body.Prompt != nil:
		text = *body.Prompt
	default:
		s.writeError(w, badRequest("prompt", "prompt or messages is required"))
		return
	}
	s.answerTokens(w, tokenize(nil, text, s.cfg.VocabularySize))
}

func (s *Server) answerTokens(w http.ResponseWriter, tokens []int32) {
	if tokens == nil {
		tokens = []int32{}
	}
	writeJSON(w, http.StatusOK, map[string]any{"count": len(tokens), "max_model_len": s.cfg.Engine.MaxContextTokens, "tokens": tokens, "token_strs": nil})
}

// chatMessage is a message of a chat; its content is text, or anything else as JSON.
type chatMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// chatText is the toy's chat template: a line for each message.
func chatText(messages []chatMessage, addGenerationPrompt bool) string {
	var b strings.Builder
	for _, m := range messages {
		var content string
		if json.Unmarshal(m.Content, &content) != nil {
			content = string(m.Content)
		}
		b.WriteString("<" + m.Role + "> " + content + "\n")
	}
	if addGenerationPrompt {
		b.WriteString(answerBegin)
	}
	return b.String()
}

// answerBegin is where the toy's chat template lets the model go on.
const answerBegin = "<assistant>"

// detokenizeVLLM serves POST /detokenize {model, tokens}.
func (s *Server) detokenizeVLLM(_ *life, w http.ResponseWriter, r *http.Request) {
	tokens, err := s.readTokens(w, r)
	if err != nil {
		s.refuse(w, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"prompt": detokenize(tokens)})
}

// tokenizeSGLang serves POST /tokenize {model, prompt}: text only.
func (s *Server) tokenizeSGLang(_ *life, w http.ResponseWriter, r *http.Request) {
	var body struct {
		Prompt string `json:"prompt"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, s.cfg.MaxBodyBytes)).Decode(&body); err != nil {
		s.writeError(w, badRequest("", "%v", err))
		return
	}
	s.answerTokens(w, tokenize(nil, body.Prompt, s.cfg.VocabularySize))
}

// detokenizeSGLang serves POST /detokenize {model, tokens, skip_special_tokens}.
func (s *Server) detokenizeSGLang(_ *life, w http.ResponseWriter, r *http.Request) {
	tokens, err := s.readTokens(w, r)
	if err != nil {
		s.refuse(w, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"text": detokenize(tokens)})
}

func (s *Server) readTokens(w http.ResponseWriter, r *http.Request) ([]int32, error) {
	var body struct {
		Tokens []int32 `json:"tokens"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, s.cfg.MaxBodyBytes)).Decode(&body); err != nil {
		return nil, badRequest("tokens", "%v", err)
	}
	for i, id := range body.Tokens {
		if id < 0 || int(id) >= s.cfg.VocabularySize {
			return nil, badRequest("tokens", "Token id %d at position %d is out of vocabulary", id, i)
		}
	}
	return body.Tokens, nil
}
